"""The KV of accepted nodes ends up in order, whatever tree they come from, and nothing else moves."""

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
def test_move_accepted_kv(device, seed, batch, depth, extra, kv_heads, d):
    from paceline.kernels.move_kv_triton import move_accepted_kv

    g = torch.Generator().manual_seed(seed)
    nodes = 1 + depth + extra
    pools = torch.randn(2, 2, batch * nodes * kv_heads + 5, d, generator=g)
    slots = torch.randperm(batch * nodes * kv_heads, generator=g).view(batch, nodes, kv_heads)
    # Increasing, as parents come before their children; often a target is the source of another node.
    path = torch.stack([torch.randperm(nodes - 1, generator=g)[:depth].sort().values + 1 for _ in range(batch)])
    path = torch.cat((torch.zeros(batch, 1, dtype=torch.int64), path), 1)
    num_accepted = torch.randint(0, depth + 1, (batch,), generator=g)
    expected = pools.clone()
    for b in range(batch):
        for level in range(
            1, int(num_accepted[b]) + 1
        ):  # one after the other, in order: sources are not overwritten yet
            expected[:, :, slots[b, level]] = pools[:, :, slots[b, path[b, level]]]
    reference = pools.clone()
    either.plain(reference[0], reference[1], slots, path, num_accepted)
    assert torch.equal(reference, expected)
    got = pools.to(device, copy=True)
    move_accepted_kv(got[0], got[1], slots.to(device), path.to(device), num_accepted.to(device))
    assert torch.equal(got.cpu(), expected)
