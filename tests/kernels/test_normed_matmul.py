"""A norm that is fused with the matmul after it equals separate kernels, over random shapes."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.kernels.hopper import matmul, normed_matmul
from paceline.kernels.hopper.epilogue import DeferredNorm, KVRows
from paceline.kernels.hopper.matmul import Tile
from paceline.kernels.hopper.normed_matmul import ResidualStream, RopeArgs

from .test_matmul import near, on, random

quick = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
streams = {"seed": st.integers(0, 10**6), "splits": st.integers(0, 4), "size": st.sampled_from([32, 72, 256])}


def stream(seed, dtype, splits, size, with_bias) -> ResidualStream:
    parts = random(seed, torch.float32, splits, 1, size) if splits else None
    return ResidualStream(
        random(seed + 1, dtype, 1, size), parts, random(seed + 2, dtype, size) if with_bias and splits else None
    )


def move(x, device):
    if isinstance(x, torch.Tensor):
        return x.to(device, copy=True)
    moved = (move(part, device) for part in x) if isinstance(x, tuple) else None
    return x if moved is None else type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)


@on
@given(
    **streams,
    with_bias=st.booleans(),
    biased=st.booleans(),
    heads=st.sampled_from([(1, 1), (6, 2), (7, 1)]),
    d=st.sampled_from([16, 24, 64]),
    pairs=st.sampled_from([2, 8, 64]),
)
@quick
def test_norm_qkv_matmul(device, dtype, seed, splits, size, with_bias, biased, heads, d, pairs):
    from paceline.kernels.hopper.normed_matmul_triton import norm_qkv_matmul

    all_heads = heads[0] + 2 * heads[1]
    weight = random(seed + 3, dtype, all_heads * d, size, scale=size**-0.5)
    slots = torch.randperm(20 * heads[1], generator=torch.Generator().manual_seed(seed))[: heads[1]]
    cache = KVRows(random(seed + 4, dtype, 20 * heads[1], d), random(seed + 5, dtype, 20 * heads[1], d), slots)
    cos, sin = random(seed + 6, dtype, 1, 1, d), random(seed + 7, dtype, 1, 1, d)
    rope = RopeArgs(random(seed + 8, dtype, all_heads * d) if biased else None, None, cos, sin, heads, cache)
    given = stream(seed, dtype, splits, size, with_bias), random(seed + 9, dtype, size), 1e-5, weight, rope
    mine, plain = move(given, device), move(given, "cpu")
    got, expected = norm_qkv_matmul(*mine, Tile(pairs, vector=True, norm=True)), normed_matmul.norm_qkv_matmul(*plain)
    for a, b in zip((*got, *mine[-1].cache[:2]), (*expected, *plain[-1].cache[:2]), strict=True):
        near(a, b, dtype)


@on
@given(
    **streams,
    with_bias=st.booleans(),
    half=st.sampled_from([16, 50, 128]),
    block_n=st.sampled_from([2, 8, 32]),
    blocks=st.sampled_from([1, 2, 3]),
)
@quick
def test_norm_gated_matmul(device, dtype, seed, splits, size, with_bias, half, block_n, blocks):
    from paceline.kernels.hopper.normed_matmul_triton import norm_gated_matmul

    weight = random(seed + 3, dtype, 2 * half, size, scale=size**-0.5)
    given = stream(seed, dtype, splits, size, with_bias), random(seed + 4, dtype, size), 1e-5, weight
    got = norm_gated_matmul(*move(given, device), Tile(block_n, vector=True, norm=True, blocks=blocks))
    for a, b in zip(got, normed_matmul.norm_gated_matmul(*given), strict=True):
        near(a, b, dtype)


@on
@given(
    seed=st.integers(0, 10**6),
    rows=st.sampled_from([2, 8, 13]),
    sizes=st.sampled_from([(32, 48), (72, 96), (256, 64)]),
    heads=st.sampled_from([(1, 1), (6, 2)]),
    d=st.sampled_from([16, 24]),
    biased=st.booleans(),
    tile=st.sampled_from([Tile(16, 32, weight_first=False, stages=2), Tile(64, 64, stages=2)]),
)
@quick
def test_a_deferred_norm(device, dtype, seed, rows, sizes, heads, d, biased, tile):
    """Its first half is fused with the matmul before it, its 1/rms with the one after it."""
    from paceline.kernels.hopper import epilogue_triton, matmul_triton

    (size, inner), all_heads = sizes, heads[0] + 2 * heads[1]
    weights = (
        random(seed, dtype, size, inner, scale=inner**-0.5),
        random(seed + 1, dtype, 2 * 50, size, scale=size**-0.5),
    )
    residual, x = random(seed + 2, dtype, rows, size + 8)[:, :size], random(seed + 3, dtype, rows, inner)
    bias, norm = random(seed + 4, dtype, size) if biased else None, random(seed + 5, dtype, size)
    there = lambda *some: [None if t is None else t.to(device, copy=True) for t in some]  # noqa: E731
    stream = ResidualStream(residual, (x.double() @ weights[0].double().t())[None], bias)
    total, hidden = normed_matmul.norm_gated_matmul(stream, norm, 1e-5, weights[1])
    got, scaled, squares = matmul_triton.residual_matmul(*there(x, weights[0], residual, bias, norm), tile)
    near(got, total, dtype)
    scale = DeferredNorm(squares, size, 1e-5)
    near(matmul_triton.gated_matmul(scaled, *there(weights[1]), tile, scale), hidden, dtype)

    qkv = random(seed + 6, dtype, all_heads * d, size, scale=size**-0.5)
    slots = torch.randperm(20 * heads[1], generator=torch.Generator().manual_seed(seed))[: rows * heads[1]]
    cos, sin = random(seed + 7, dtype, rows, 1, d), random(seed + 8, dtype, rows, 1, d)
    pool = random(seed + 9, dtype, 2, 20 * heads[1], d)
    rope = RopeArgs(random(seed + 10, dtype, all_heads * d), None, cos, sin, heads, KVRows(*pool.clone(), slots))
    expected = normed_matmul.norm_qkv_matmul(stream, norm, 1e-5, qkv, rope)[1]
    parts = matmul_triton.split_k_matmul(scaled, *there(qkv), replace(tile, splits=3))
    mine = move(rope._replace(cache=KVRows(*pool, slots)), device)
    near(epilogue_triton.rope_and_cache(parts, *mine, scale), expected, dtype)
    for a, b in zip(mine.cache[:2], rope.cache[:2], strict=True):
        near(a, b, dtype)


def test_a_norm_is_fused_for_a_single_row_only(monkeypatch):
    """And only where the table says so."""
    calls = []
    monkeypatch.setattr(normed_matmul, "has_kernels", lambda x: True)
    monkeypatch.setattr(matmul, "_is_tuned", lambda device: True)
    weight = torch.empty(64, 32, dtype=torch.bfloat16)
    for tile, rows in ((Tile(4, norm=True), 1), (Tile(4, norm=True), 2), (Tile(4), 1)):
        monkeypatch.setattr(matmul, "MATMUL_TILES", {(1, 64, 32): tile, (8, 64, 32): tile})
        calls.append(normed_matmul._fused_tile(torch.empty(rows, 32), weight))
    assert calls == [Tile(4, norm=True), None, None]
