"""Features and tokens are written to their request's ring, and rejected ones to the scratch slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.kernels.feature_ring import write_features as either

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
quick = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.parametrize("device", DEVICES)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    count=st.integers(1, 4),
    extra=st.integers(0, 3),
    wide=st.sampled_from([5, 96]),
    tree=st.booleans(),
    rejects=st.booleans(),
)
@quick
def test_write_features(device, seed, batch, count, extra, wide, tree, rejects):
    from paceline.kernels.feature_ring_triton import write_features

    g = torch.Generator().manual_seed(seed)
    ring, tokens = torch.randn(6, 7, wide, generator=g), torch.randint(0, 99, (6, 7), generator=g, dtype=torch.int32)
    slot = torch.randperm(5, generator=g)[:batch].int() + 1
    position = torch.randint(0, 50, (batch, 2), generator=g, dtype=torch.int32)[:, 1]
    features = torch.randn(batch, count + extra, wide, generator=g)
    sampled = torch.randint(0, 99, (batch, count), generator=g)
    path = torch.stack([torch.randperm(count + extra, generator=g)[:count].sort().values for _ in range(batch)])
    num_accepted = torch.randint(0, count, (batch,), generator=g)
    shown = features if tree else features[:, :count]
    args = slot, position, shown, sampled, path if tree else None, num_accepted if rejects else None
    expected = ring.clone(), tokens.clone()
    for b in range(batch):
        for t in range(1 + int(num_accepted[b]) if rejects else count):
            at = int(position[b]) + t
            expected[0][slot[b], at % 7] = features[b, path[b, t] if tree else t]
            expected[1][slot[b], (at + 1) % 7] = sampled[b, t]
    for work, where in ((either.plain, "cpu"), (write_features, device)):
        got = ring.to(where, copy=True), tokens.to(where, copy=True)
        work(*got, *(None if a is None else a.to(where) for a in args))
        assert torch.equal(got[0][1:].cpu(), expected[0][1:]) and torch.equal(got[1][1:].cpu(), expected[1][1:])
