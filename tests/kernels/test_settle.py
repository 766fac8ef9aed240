"""Guesses that hold end up in order, whatever tree they come from, and nothing else moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.kernels.move_kv import move_accepted_kv as either

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
quick = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.parametrize("device", DEVICES)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 4),
    depth=st.integers(1, 6),
    extra=st.integers(0, 9),
    kv_heads=st.integers(1, 3),
    d=st.sampled_from([8, 24]),
)
@quick
def test_settle(device, seed, batch, depth, extra, kv_heads, d):
    from paceline.kernels.move_kv_triton import move_accepted_kv

    g = torch.Generator().manual_seed(seed)
    members = 1 + depth + extra
    pools = torch.randn(2, 2, batch * members * kv_heads + 5, d, generator=g)
    slots = torch.randperm(batch * members * kv_heads, generator=g).view(batch, members, kv_heads)
    # Increasing, as parents come before their children; often onto a place that another one leaves.
    way = torch.stack([torch.randperm(members - 1, generator=g)[:depth].sort().values + 1 for _ in range(batch)])
    way = torch.cat((torch.zeros(batch, 1, dtype=torch.int64), way), 1)
    held = torch.randint(0, depth + 1, (batch,), generator=g)
    expected = pools.clone()
    for b in range(batch):
        for level in range(1, int(held[b]) + 1):  # one after the other, in order: sources are not overwritten yet
            expected[:, :, slots[b, level]] = pools[:, :, slots[b, way[b, level]]]
    twin = pools.clone()
    either.plain(twin[0], twin[1], slots, way, held)
    assert torch.equal(twin, expected)
    got = pools.to(device, copy=True)
    move_accepted_kv(got[0], got[1], slots.to(device), way.to(device), held.to(device))
    assert torch.equal(got.cpu(), expected)
