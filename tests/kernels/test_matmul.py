"""Matmuls of few rows and their epilogues equal their references, over random shapes and tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.kernels.hopper import epilogue, matmul
from paceline.kernels.hopper.epilogue import HeadNorms, KVRows
from paceline.kernels.hopper.matmul import Tile

# The interpreter computes in NumPy, which has no bfloat16.
CASES = [
    ("cpu", torch.float32),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
on = pytest.mark.parametrize(("device", "dtype"), CASES)
quick = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
seeds = st.integers(0, 10**6)
TILES = [
    Tile(16, 32, 1, stages=2),
    Tile(64, 64, 3, stages=3),
    Tile(32, 16, 4, weight_first=False),
    Tile(64, 128, 2, warps=8, stages=2),
    Tile(4, 128, 2, vector=True),
    Tile(8, 32, 1, vector=True, weight_first=False),
    Tile(4, 64, 2, vector=True, preload=True),
    Tile(4, 32, 2, vector=True, unroll=2),
    Tile(8, 512, 1, vector=True, preload=True),  # more than there is
    Tile(64, 64, 3, stages=3, preload=True),
    Tile(16, 128, 2, preload=True),  # in part more than there is
]


def near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (got.cpu().double() - expected.double()).norm() / expected.double().norm()
    # Results of a chain are rounded several times, and the worst of hundreds of small ones was 1.05e-2.
    assert error < (1.5e-2 if dtype == torch.bfloat16 else 1e-5)


def random(seed: int, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize(
    ("out", "size", "tile", "lines"),
    [
        (64, 128, Tile(4, 64, vector=True), 2),  # a row is two cache lines
        (64, 1024, Tile(16, 64, splits=4), 4),  # a split's share of it
        (4096, 4096, Tile(4, 512, vector=True), 32),  # half of what there is
        (2**18, 4096, Tile(4, 512, vector=True), 1),
    ],
)
def test_weights_are_prefetched_up_to_a_number_of_bytes(out, size, tile, lines, monkeypatch):
    from paceline.kernels import device
    from paceline.kernels.hopper.matmul_triton import prefetch_lines

    monkeypatch.setattr(device, "prefetch_bytes", 16 << 20)
    assert prefetch_lines(torch.empty(out, size, dtype=torch.bfloat16, device="meta"), tile) == lines


@on
@given(
    seed=seeds,
    rows=st.sampled_from([1, 2, 7, 16, 17, 40, 64]),
    out=st.sampled_from([16, 50, 128]),
    size=st.sampled_from([32, 72, 256, 320]),
    tile=st.sampled_from(TILES),
)
@quick
def test_matmuls(device, dtype, seed, rows, out, size, tile):
    from paceline.kernels.hopper.matmul_triton import gated_matmul, split_k_matmul

    rows = 1 if tile.vector else rows
    x = random(seed, dtype, rows, size + 8)[:, :size]
    weight = random(seed + 1, dtype, 2 * out, size, scale=size**-0.5)
    parts = split_k_matmul(x.to(device), weight[:out].to(device), tile)
    assert parts.shape == (tile.splits, rows, out)
    near(parts.sum(0), x.double() @ weight[:out].double().t(), dtype)
    again = split_k_matmul(x.to(device), weight[:out].to(device), tile)
    assert torch.equal(parts, again)
    gate, up = (x.double() @ weight.double().t()).chunk(2, -1)
    near(gated_matmul(x.to(device), weight.to(device), tile), torch.nn.functional.silu(gate) * up, dtype)


@on
@given(
    seed=seeds, splits=st.integers(0, 5), rows=st.integers(1, 5), size=st.sampled_from([8, 96, 130]), b=st.booleans()
)
@quick
def test_add_norm(device, dtype, seed, splits, rows, size, b):
    from paceline.kernels.hopper.epilogue_triton import add_norm

    parts, residual = random(seed, torch.float32, splits, rows, size), random(seed + 1, dtype, rows, size + 3)[:, :size]
    bias, weight = random(seed + 2, dtype, size) if b else None, random(seed + 3, dtype, size)
    got = add_norm(*(None if t is None else t.to(device) for t in (parts, residual, bias, weight)), 1e-5)
    for mine, other in zip(got, epilogue.add_norm.plain(parts, residual, bias, weight, 1e-5), strict=True):
        near(mine, other, dtype)


@on
@given(
    seed=seeds,
    splits=st.integers(1, 4),
    rows=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (6, 2), (7, 1), (3, 3)]),
    d=st.sampled_from([16, 24, 64]),
    b=st.booleans(),
    normed=st.booleans(),
)
@quick
def test_rope_and_cache(device, dtype, seed, splits, rows, heads, d, b, normed):
    from paceline.kernels.hopper.epilogue_triton import rope_and_cache

    all_heads = heads[0] + 2 * heads[1]
    parts = random(seed, torch.float32, splits, rows, all_heads * d)
    bias = random(seed + 1, dtype, all_heads * d) if b else None
    norms = [random(seed + i, dtype, d) for i in (2, 3)] if normed else None
    cos, sin = random(seed + 4, dtype, rows, 2, d)[:, :1], random(seed + 5, dtype, rows, 1, d)
    slots = torch.randperm(40 * heads[1], generator=torch.Generator().manual_seed(seed))[: rows * heads[1]]
    pools = random(seed + 6, dtype, 2, 40 * heads[1], d)

    def run(work, where):
        there = lambda t: None if t is None else t.to(where, copy=True)  # noqa: E731
        k_rows, v_rows = there(pools[0]), there(pools[1])
        own = HeadNorms(*(there(n) for n in norms), 1e-6) if norms else None
        cache = KVRows(k_rows, v_rows, there(slots))
        return work(there(parts), there(bias), own, there(cos), there(sin), heads, cache), k_rows, v_rows

    for mine, other in zip(run(rope_and_cache, device), run(epilogue.rope_and_cache.plain, "cpu"), strict=True):
        near(mine, other, dtype)


@on
@pytest.mark.parametrize(("rows", "size"), [(1, 48), (5, 200)])
def test_concat_norm(device, dtype, rows, size):
    from paceline.kernels.hopper.epilogue_triton import concat_norm

    tokens = torch.randint(0, 9, (rows, 3), generator=torch.Generator().manual_seed(rows))[:, 1]
    table, first, second = random(1, dtype, 9, size), random(2, dtype, size), random(3, dtype, size)
    x = random(4, dtype, rows, size + 1)[:, :size]
    args = tokens, table, first, x, second
    near(concat_norm(*(a.to(device) for a in args), 1e-6), epilogue.concat_norm.plain(*args, 1e-6), dtype)


def test_the_table_is_asked_by_rows_and_shape(monkeypatch):
    one, some = Tile(16, 512, vector=True), Tile(64, 64, 2)
    monkeypatch.setattr(matmul, "MATMUL_TILES", {(1, 6, 8): one, (16, 6, 8): some})
    monkeypatch.setattr(matmul, "_is_tuned", lambda device: True)
    weight = torch.zeros(6, 8, dtype=torch.bfloat16)
    assert matmul.tile_for(1, weight) is one
    assert matmul.tile_for(9, weight) is some and matmul.tile_for(16, weight) is some
    assert matmul.tile_for(2, weight) is None
    assert matmul.tile_for(17, weight) is None and matmul.tile_for(99, weight) is None
    assert matmul.tile_for(1, weight.t()) is None and matmul.tile_for(1, weight.float()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_may_name_cublaslt(dtype, monkeypatch):
    monkeypatch.setattr(matmul, "tile_for", lambda rows, weight: Tile(cublaslt=True))
    monkeypatch.setattr(matmul, "has_kernels", lambda x: True)
    x, weight = random(1, dtype, 72, 64), random(2, dtype, 48, 64) / 8
    parts = matmul.split_k_matmul(x, weight)
    assert parts.shape == (1, 72, 48) and parts.dtype == dtype
    near(parts[0], x.float() @ weight.float().t(), dtype)


def test_the_table_that_is_shipped_can_be_used():
    assert all(
        rows in matmul.ROW_BUCKETS and out % 16 == 0 and size % 16 == 0 for rows, out, size in matmul.MATMUL_TILES
    )


@pytest.mark.gpu
@pytest.mark.parametrize("entry", matmul.MATMUL_TILES.items(), ids=str)
def test_the_shipped_tiles(entry):
    """At their own size: small cases cannot show a tile whose shared memory the device does not have."""
    (rows, out, size), tile = entry
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, size, generator=g, device="cuda").bfloat16()
    weight = (torch.randn(out, size, generator=g, device="cuda") * size**-0.5).bfloat16()
    expected = x.float() @ weight.float().t()
    if tile.gated:
        gate, up = expected.chunk(2, -1)
        got, expected = matmul.gated_matmul(x, weight), torch.nn.functional.silu(gate) * up
    else:
        got = matmul.split_k_matmul(x, weight).sum(0)
    near(got, expected.cpu(), torch.bfloat16)
