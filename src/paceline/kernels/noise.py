"""Noise without state: the Gumbel noise of token v at a position is a hash of (seed, request id, position, v).

A request's key is a hash of (seed, request id), a position's key a hash of (request key, position), and the noise of
the vocabulary is the SplitMix64 stream that starts at the position's key. Integers wrap at 64 bits and are exact on
every device, so the same key gives the same noise everywhere, in any batch, in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.constants import constant

MASK = (1 << 64) - 1  # Python integers do not wrap by themselves
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's increment and factors


def signed(x: int) -> int:
    """The int64 with the same bits: torch has no unsigned arithmetic."""
    return x - (1 << 64) if x >> 63 else x


def _mix(x: int) -> int:
    """SplitMix64's finaliser on Python integers."""
    x = ((x ^ (x >> 30)) * MIX1) & MASK
    x = ((x ^ (x >> 27)) * MIX2) & MASK
    return x ^ (x >> 31)


def request_key(seed: int, request_id: int) -> int:
    """The key of a request, as an int64."""
    return signed(_mix((_mix((seed + GOLDEN) & MASK) + request_id * GOLDEN + GOLDEN) & MASK))


def seed_with_key(key: int) -> int:
    """The seed with which request 0 has this key, as an int64: the mixing of bits can be taken back."""
    return signed((_unmixed((_unmixed(key & MASK) - GOLDEN) & MASK) - GOLDEN) & MASK)


def _unmixed(x: int) -> int:
    x ^= (x >> 31) ^ (x >> 62)
    x = (x * pow(MIX2, -1, MASK + 1)) & MASK
    x ^= (x >> 27) ^ (x >> 54)
    x = (x * pow(MIX1, -1, MASK + 1)) & MASK
    return x ^ (x >> 30) ^ (x >> 60)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64: the arithmetic one, without the copies of the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_tensor(x: Tensor) -> Tensor:
    """The same on int64 tensors."""
    x = _shift(x, 30).bitwise_xor_(x).mul_(signed(MIX1))
    x = _shift(x, 27).bitwise_xor_(x).mul_(signed(MIX2))
    return _shift(x, 31).bitwise_xor_(x)


def position_keys(request_keys: Tensor, positions: Tensor) -> Tensor:
    """int64 keys of requests and token positions, broadcast -> int64 keys of (request, position)."""
    return _mix_tensor((positions.long() + 1).mul_(signed(GOLDEN)) + request_keys)


@constant
def _steps(vocab: int, device: torch.device) -> Tensor:
    """What the stream's state has grown by at each token: (v + 1) * GOLDEN, int64 [vocab]."""
    return torch.arange(1, vocab + 1, device=device) * signed(GOLDEN)


def stream(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Elements first to first + count - 1 of the stream that starts at a key: int64 [count] of 32 random bits each."""
    steps = torch.arange(first + 1, first + count + 1, device=device).mul_(signed(GOLDEN))
    return _shift(_mix_tensor(steps.add_(key)), 32)


def gumbel(keys: Tensor, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gumbel noise [*keys.shape, vocab].

    Gumbel = -log(E) with E = -log1p(-u) exponential and u uniform in (0, 1). The argmax is decided where E is small,
    so u keeps its 32 bits of resolution near 0, where a float32 can represent them, and is kept off 0 and off 1.
    """
    bits = _shift(_mix_tensor(keys[..., None] + _steps(vocab, keys.device)), 32)
    u = bits.to(dtype).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def noise_ahead(request_keys: Tensor, positions: Tensor, count: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """The noise [B, count, vocab] of requests at `count` positions each, from `positions` [B] on."""
    if request_keys.is_cuda and dtype == torch.float32:
        from paceline.kernels.fused_triton import noise_ahead as fused

        return fused(request_keys, positions, count, vocab)
    ahead = positions[:, None] + torch.arange(count, device=positions.device)
    return gumbel(position_keys(request_keys[:, None], ahead), vocab, dtype)


def noise_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of scores and noise: float32 whatever the model computes in, but float64 for float64 models."""
    return torch.float64 if dtype == torch.float64 else torch.float32
