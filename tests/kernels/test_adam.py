"""The kernel steps as the reference does, element by element, whatever the precision of what it reads and writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.kernels.adam import Rule
from paceline.kernels.adam import adam as either

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
quick = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def tensors(seed, count, moments, weights, master):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(count, generator=g)
    mean, grad = torch.randn(count, generator=g) * 1e-2, torch.randn(count, generator=g)
    square = torch.rand(count, generator=g) * 1e-3
    return [
        weight.to(weights),
        weight.clone() if master else None,
        mean.to(moments),
        square.to(moments),
        grad.to(weights),
    ]


@pytest.mark.parametrize("device", DEVICES)
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from([1, 1000, 3000]),
    master=st.booleans(),
    decay=st.sampled_from([1.0, 0.99]),
    step=st.sampled_from([1, 7, 3000]),
    key=st.sampled_from([1, 16, -(2**63), 2**62 + 12345]),
    low=st.booleans(),
)
@quick
def test_equals_the_reference(device, seed, count, master, decay, step, key, low):
    from paceline.kernels.adam_triton import adam

    half = torch.bfloat16 if low and device == "cuda" else torch.float32  # the interpreter has no bfloat16
    before = tensors(seed, count, half, half, master)
    rule = Rule(0.01, (0.9, 0.999), 1e-8, decay, step)
    runs = []
    for work, where in ((either.plain, "cpu"), (adam, device)):
        got = [None if t is None else t.to(where, copy=True) for t in before]
        work(*got, rule, key)
        runs.append([t.cpu().float() for t in got if t is not None])
    for plain, fused in zip(*runs, strict=True):
        # Near the middle of two neighbours, the last bit of a sum may tip either kind of rounding.
        off = (plain - fused).abs() > 1e-6 + 1e-5 * plain.abs()
        assert off.float().mean() < (0.002 if half == torch.bfloat16 else 1e-9)
        torch.testing.assert_close(fused, plain, rtol=2**-7 if half == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_moments_are_rounded_stochastically_with_the_same_bits(device):
    """As bfloat16 is, with float32 tensors, which the interpreter has."""
    from paceline.kernels.adam_triton import adam

    rule, key, count = Rule(0.0, (0.9, 0.999), 1e-8, 1.0, 5), -987654321, 5000
    low = tensors(3, count, torch.bfloat16, torch.float32, master=False)
    high = [None if t is None else t.float().to(device) for t in low]
    either.plain(*low, rule, key)
    adam(*high, rule, key, stochastic=True)
    for plain, fused in zip(low[2:4], high[2:4], strict=True):
        fused = fused.cpu()
        assert torch.equal(fused, fused.bfloat16().float())
        assert (fused != plain.float()).float().mean() < 0.002
