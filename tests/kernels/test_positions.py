"""Slots, positions, rotations and page tables: the kernels compute what the references do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.kernels import positions
from paceline.model.rope import Rope, rotation_constants

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on = pytest.mark.parametrize("device", DEVICES)
quick = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@on
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 9), st.sampled_from([4, 16]), st.integers(1, 3))
@quick
def test_kv_slots(device, seed, batch, new, page, kv_heads):
    from paceline.kernels.positions_triton import kv_slots

    g = torch.Generator().manual_seed(seed)
    wide = torch.randint(1, 50, (batch, 9), generator=g, dtype=torch.int32)
    table = wide[:, 2:7]  # columns of wider rows, as in the engine
    context = torch.randint(0, 5 * page, (batch, 2), generator=g, dtype=torch.int32)[:, 1]
    expected = positions.kv_slots.plain(table, context, new, page, kv_heads)
    got = kv_slots(wide.to(device)[:, 2:7], context.to(device), new, page, kv_heads)
    assert torch.equal(got[0].cpu(), expected[0]) and torch.equal(got[1].cpu(), expected[1])


@on
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([1, 3, 63]))
@quick
def test_tree_nodes(device, seed, batch, nodes):
    from paceline.kernels.positions_triton import tree_nodes

    g = torch.Generator().manual_seed(seed)
    wide = torch.randint(0, 5000, (batch, 6), generator=g, dtype=torch.int32)
    draft_tokens = torch.randint(-2, 90, (batch, 64), generator=g, dtype=torch.int32)
    deep = torch.randint(0, 9, (batch, nodes + 1), generator=g)
    for depth in (deep, torch.arange(nodes + 1).expand(batch, -1)):
        given_ = wide[:, 1], wide[:, 4], draft_tokens[:, :nodes], depth  # columns of wider rows, as in the engine
        expected = positions.tree_nodes.plain(*given_)
        there = wide.to(device)
        got = tree_nodes(there[:, 1], there[:, 4], draft_tokens.to(device)[:, :nodes], depth.to(device))
        for mine, other in zip(got, expected, strict=True):
            assert mine.dtype == other.dtype and torch.equal(mine.cpu(), other)


@on
@pytest.mark.parametrize(("rows", "d", "rope"), [(1, 16, Rope()), (37, 24, Rope(1e6)), (5, 128, Rope(500000.0))])
def test_rotations(device, rows, d, rope):
    """Also at large positions, where an inexact sine would be noise."""
    from paceline.kernels.positions_triton import rotations

    at = torch.randint(0, 130_000, (rows, 2), generator=torch.Generator().manual_seed(rows))[:, 1]
    inv_freq, signs = rotation_constants(rope, d, torch.device("cpu"), torch.float32)
    expected = positions.rotations.plain(at, inv_freq, signs, torch.float32)
    got = rotations(at.to(device), inv_freq.to(device), signs.to(device), torch.float32)
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-5, atol=1e-5)


@on
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([3, 16, 40]), st.integers(1, 9))
@quick
def test_window_table(device, seed, batch, window, capacity):
    from paceline.kernels.positions_triton import window_table

    g = torch.Generator().manual_seed(seed)
    slot, drafted, start = torch.randint(0, 60, (3, batch), generator=g, dtype=torch.int32)
    sizes = window, window + capacity + 2, window + 2 * capacity + 5, capacity
    expected = positions.window_table.plain(slot, drafted, start - 5, *sizes)
    got = window_table(slot.to(device), drafted.to(device), (start - 5).to(device), *sizes)
    assert torch.equal(got[0].cpu(), expected[0]) and torch.equal(got[1].cpu(), expected[1])
