"""The Triton kernel, its reference in PyTorch and the definition agree over random shapes, trees and page tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.kernels.paged_attention import PageRows, chain_tree

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_tree(batch: int, new: int, generator: torch.Generator) -> torch.Tensor:
    """Visibility bits of random trees: each node sees itself and what its parent sees."""
    bits = torch.zeros(batch, new, dtype=torch.int64)
    for b in range(batch):
        for t in range(new):
            parent = int(torch.randint(-1, t, (1,), generator=generator)) if t else -1
            above = int(bits[b, parent]) if parent >= 0 else 0
            bits[b, t] = above | (1 << t if t < 63 else -(1 << 63))
    return bits


def case(seed, batch, new, kv_heads, group, d, page_size, longest, shared, dtype):
    g = torch.Generator().manual_seed(seed)
    context = torch.randint(1, longest + 1, (batch,), generator=g, dtype=torch.int32)
    most = -(-(longest + new) // page_size)
    pages = torch.randperm(batch * most + 3, generator=g)[: batch * most].view(batch, most).int() + 1
    if shared:
        pages[:, 0] = pages[0, 0]
    pools = [torch.randn(batch * most + 5, kv_heads, page_size, d, generator=g, dtype=torch.float64) for _ in range(2)]
    q = torch.randn(batch, new, kv_heads * group, d, generator=g, dtype=torch.float64)
    return q.to(dtype), pools[0].to(dtype), pools[1].to(dtype), pages, context, random_tree(batch, new, g)


def definition(q, k_pool, v_pool, table, context, tree):
    """Every query on its own, in float64."""
    batch, new, heads, d = q.shape
    kv_heads, page_size = k_pool.shape[1:3]
    out = torch.empty(q.shape, dtype=torch.float64)
    for b in range(batch):
        total = int(context[b]) + new
        where = torch.arange(total)
        page, offset = table[b, where // page_size].long(), where % page_size
        for t in range(new):
            seen = [i for i in range(total) if i < context[b] or int(tree[b, t]) >> (i - int(context[b])) & 1]
            for h in range(heads):
                kv = h * kv_heads // heads
                k = k_pool[page[seen], kv, offset[seen]].double()
                v = v_pool[page[seen], kv, offset[seen]].double()
                out[b, t, h] = (k @ q[b, t, h].double() * d**-0.5).softmax(0) @ v
    return out


def reference(q, k_pool, v_pool, table, context, tree):
    group = q.shape[2] // k_pool.shape[1]
    rows = PageRows.build(table, context, tree, k_pool.shape[2], group, q.dtype)
    return rows.attend(q.flatten(0, 1), k_pool, v_pool).view(q.shape)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())


shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "batch": st.integers(1, 5),
        "new": st.sampled_from([1, 1, 2, 5, 8]),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 4),
        "d": st.sampled_from([16, 32, 48, 64]),
        "page_size": st.sampled_from([4, 16, 64]),
        "longest": st.integers(1, 150),
        "shared": st.booleans(),
    }
)
quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@given(shapes)
@quick
def test_reference_equals_the_definition(shape):
    if shape["shared"] and shape["page_size"] > shape["longest"]:
        shape["shared"] = False
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        args = case(**shape, dtype=dtype)
        assert relative(reference(*args), definition(*args)) < tolerance


@pytest.mark.parametrize("device", DEVICES)
@given(shape=shapes)
@quick
def test_kernel_equals_the_definition(device, shape):
    from paceline.kernels.paged_attention_triton import paged_attention

    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        if device == "cpu" and dtype == torch.bfloat16:
            continue  # the interpreter computes in NumPy, which has no bfloat16
        args = case(**shape, dtype=dtype)
        got = paged_attention(*(a.to(device) for a in args))
        assert relative(got, definition(*args)) < tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("batch", "new", "longest"), [(1, 1, 3000), (2, 64, 700), (1, 40, 130), (9, 3, 60)])
def test_long_contexts_and_wide_trees(device, batch, new, longest):
    from paceline.kernels.paged_attention_triton import paged_attention

    group = 3 if device == "cpu" else 7
    args = case(0, batch, new, 2, group, 32, 64, longest, False, torch.float32)
    expected = definition(*args)
    assert relative(reference(*args), expected) < 1e-5
    assert relative(paged_attention(*(a.to(device) for a in args)), expected) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_whatever_the_tile(device):
    """Blocks larger and smaller than a page, queries divided over programs, more and fewer splits."""
    from paceline.kernels.paged_attention_triton import AttentionTile, paged_attention

    args = case(4, 2, 9, 1, 4, 16, 32, 200, False, torch.float32)
    expected = definition(*args)
    for tile in (
        AttentionTile(32),
        AttentionTile(16, 16, 4, 3),
        AttentionTile(128, 32),
        AttentionTile(64, 64, 8, 4, 1),
        AttentionTile(64, max_splits=1),
        AttentionTile(32, waves=9),
    ):
        got = paged_attention(*(a.to(device) for a in args), tile=tile)
        assert relative(got, expected) < 1e-5, tile


@pytest.mark.parametrize(
    ("queries", "readers", "capacity", "page", "name"),
    [
        (7, 4, 4224, 64, "16"), (7, 263, 4224, 64, "16"), (7, 264, 4224, 64, "large_batch"), (7, 264, 256, 1, "16"),
        (56, 4, 4224, 64, "small_batch"), (56, 8, 4224, 64, "small_batch"),
        (56, 12, 4224, 64, "64"),  # three requests are not few
        (56, 4, 320, 1, "64"),  # a drafter's window is not split that finely
        (28, 4, 4224, 64, "32"), (112, 4, 4224, 64, "64"),
    ],
)  # fmt: skip
def test_the_tile_of_attention_follows_the_batch(queries, readers, capacity, page, name):
    from paceline.kernels import paged_attention_triton as attention

    assert (
        attention.attention_tile_name(queries, readers, capacity, page, 132) == name
        and name in attention.ATTENTION_TILES
    )


def test_advancing_equals_building_anew():
    """The mask advanced by a token is the mask of the next pass."""
    table = torch.tensor([[1, 2, 9], [3, 4, 9], [5, 9, 9]], dtype=torch.int32)
    context = torch.tensor([20, 31, 3], dtype=torch.int32)
    tree = chain_tree(3, 1, torch.device("cpu"))
    rows = PageRows.build(table, context, tree, 16, 2, torch.float64)
    q = torch.randn(3, 4, 16, dtype=torch.float64)
    k, v = torch.randn(2, 10, 2, 16, 16, dtype=torch.float64)
    advanced = 0
    while rows.steps_left:
        rows.advance()
        advanced += 1
        context += 1
        fresh = PageRows.build(table, context, tree, 16, 2, torch.float64)
        torch.testing.assert_close(rows.attend(q, k, v), fresh.attend(q, k, v))
    assert advanced == 0, "the second request is at the end of its page"
    context = torch.tensor([20, 24, 3], dtype=torch.int32)
    rows = PageRows.build(table, context, tree, 16, 2, torch.float64)
    while rows.steps_left:
        rows.advance()
        advanced += 1
        context += 1
        fresh = PageRows.build(table, context, tree, 16, 2, torch.float64)
        torch.testing.assert_close(rows.attend(q, k, v), fresh.attend(q, k, v))
    assert advanced == 7
