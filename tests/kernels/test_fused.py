"""The fused kernels compute what their references in PyTorch do."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels import noise
from paceline.model.config import DecoderConfig
from paceline.model.decoder import gated
from paceline.model.rope import rotate
from paceline.rollout.pages import PagePool

from ..conftest import tiny_config

# The interpreter computes in NumPy, which has no bfloat16.
CASES = [
    ("cpu", torch.float32),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
on = pytest.mark.parametrize(("device", "dtype"), CASES)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for a rounding of what was added up."""
    step = 2**-7 if got.dtype == torch.bfloat16 else 2**-21
    torch.testing.assert_close(got.cpu().float(), expected.float(), rtol=step, atol=4 * step)


@on
@pytest.mark.parametrize(("rows", "heads", "d", "others"), [(1, 3, 16, 0), (7, 16, 64, 4), (65, 5, 48, 2)])
def test_rotate(device, dtype, rows, heads, d, others):
    from paceline.kernels.fused_triton import rotate as fused

    wide = torch.randn(rows, heads + others, d, dtype=dtype)
    angle = torch.randn(rows, 4, 1, d)
    cos, sin = angle.cos().to(dtype)[:, 1], angle.sin().to(dtype)[:, 2]  # neither is contiguous
    expected = rotate(wide[:, :heads].float(), cos.float(), sin.float())
    got = fused(
        wide.to(device)[:, :heads], angle.to(device).cos().to(dtype)[:, 1], angle.to(device).sin().to(dtype)[:, 2]
    )
    assert got.is_contiguous()
    close(got, expected)


@on
@pytest.mark.parametrize(("rows", "size"), [(1, 96), (9, 2048), (3, 5000)])
def test_gated(device, dtype, rows, size):
    from paceline.kernels.fused_triton import gated as fused

    both = torch.randn(rows, 2 * size, dtype=dtype) * 3
    close(fused(both.to(device)), gated(both.float()))


@on
def test_write(device, dtype):
    from paceline.kernels.fused_triton import write

    config = DecoderConfig.from_hf(tiny_config())
    expected, got = (PagePool(config, 9, 4, dtype, torch.device(where)) for where in ("cpu", device))
    qkv = torch.randn(5, config.heads + 2 * config.kv_heads, config.head_dim, dtype=dtype)
    k, v = qkv[:, config.heads : config.heads + config.kv_heads], qkv[:, config.heads + config.kv_heads :]
    pages, offsets = torch.tensor([1, 1, 3, 8, 2]), torch.tensor([0, 1, 3, 2, 2])
    expected.write(2, expected.slots(pages, offsets), k, v)
    there = qkv.to(device)
    k, v = there[:, config.heads : config.heads + config.kv_heads], there[:, config.heads + config.kv_heads :]
    slots = got.slots(pages.to(device), offsets.to(device))
    write(k, v, got.k_layers[2].view(-1, config.head_dim), got.v_layers[2].view(-1, config.head_dim), slots)
    assert torch.equal(got.k.cpu(), expected.k) and torch.equal(got.v.cpu(), expected.v)
    assert expected.k.any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("batch", "count", "vocab"), [(3, 1, 104), (2, 5, 4001)])
def test_noise_ahead(device, batch, count, vocab):
    """The hash is exact: noise that is off by more than rounding is the noise of another key."""
    from paceline.kernels.fused_triton import noise_ahead as fused

    keys = torch.randint(-(2**63), 2**63 - 1, (batch, 2))[:, 1]  # columns of wider rows, as in the engine
    positions = torch.randint(0, 5000, (batch, 3), dtype=torch.int32)[:, 1]
    got = fused(keys.to(device), positions.to(device), count, vocab).cpu()
    torch.testing.assert_close(
        got, noise.noise_ahead(keys, positions, count, vocab, torch.float32), rtol=2e-6, atol=2e-6
    )
    # Where u is near 1 float32 has not its resolution; such noise is low and never wins.
    expected = noise.noise_ahead(keys, positions, count, vocab, torch.float64)
    high = expected > -2
    torch.testing.assert_close(got.double()[high], expected[high], rtol=1e-5, atol=1e-5)
