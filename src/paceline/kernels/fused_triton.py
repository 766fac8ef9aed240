"""Small operations of a decode step, each as one GPU kernel instead of several.

A step of a small model is hundreds of kernels that each do almost nothing, so their number decides its time. These
compute what their references do, intermediate roundings included: `model.rope.rotate`, `model.decoder.gated`,
`PagePool.write` and `kernels.noise.noise_ahead`, which call them where a GPU runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.hopper.epilogue_triton import silu_times
from paceline.kernels.noise import GOLDEN, MIX1, MIX2, signed

_GOLDEN = tl.constexpr(signed(GOLDEN))
_MIX1 = tl.constexpr(signed(MIX1))
_MIX2 = tl.constexpr(signed(MIX2))
ELEMENTWISE_BLOCK = 1024  # numbers that a program of an elementwise kernel takes


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `model.rope.rotate`: x [N, heads, d] with contiguous heads; cos and sin [N, 1, d] -> [N, heads, d]"""
    n, heads, d = x.shape
    out = torch.empty(n, heads, d, dtype=x.dtype, device=x.device)
    _rotate[(n,)](
        x, cos, sin, out, x.stride(0), cos.stride(0), sin.stride(0), heads,
        D=d, BLOCK_H=triton.next_power_of_2(heads), BLOCK_D=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    x, cos, sin, out, x_stride, cos_stride, sin_stride, heads,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < heads) & (dim < D)
    same = tl.load(x + n * x_stride + head * D + dim, mask=mask, other=0.0)
    paired = tl.load(x + n * x_stride + head * D + (dim + D // 2) % D, mask=mask, other=0.0)
    c = tl.load(cos + n * cos_stride + dim, mask=dim < D, other=0.0).to(tl.float32)
    s = tl.load(sin + n * sin_stride + dim, mask=dim < D, other=0.0).to(tl.float32)
    term = (same.to(tl.float32) * c).to(out.dtype.element_ty).to(tl.float32)
    rotated = term + paired.to(tl.float32) * s
    tl.store(out + (n * heads + head) * D + dim, rotated.to(out.dtype.element_ty), mask=mask)


def gated(gate_up: Tensor) -> Tensor:
    """[N, 2 * size], gate and up concatenated -> silu(gate) * up, [N, size]"""
    n = gate_up.shape[0]
    size = gate_up.shape[1] // 2
    out = torch.empty(n, size, dtype=gate_up.dtype, device=gate_up.device)
    _gated[(n, triton.cdiv(size, ELEMENTWISE_BLOCK))](gate_up, out, size, BLOCK=ELEMENTWISE_BLOCK, num_warps=4)
    return out


@triton.jit
def _gated(gate_up, out, size, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    gate = tl.load(gate_up + n * 2 * size + i, mask=mask, other=0.0)
    up = tl.load(gate_up + n * 2 * size + size + i, mask=mask, other=0.0)
    tl.store(out + n * size + i, silu_times(gate, up), mask=mask)


def write(k: Tensor, v: Tensor, k_rows: Tensor, v_rows: Tensor, slots: Tensor) -> None:
    """Write k and v [N, kv_heads, d] to the rows `slots` [N * kv_heads] of k_rows and v_rows [rows, d]."""
    n, heads, d = k.shape
    _write[(n,)](
        k, v, k_rows, v_rows, slots, k.stride(0), v.stride(0), heads,
        D=d, BLOCK_H=triton.next_power_of_2(heads), BLOCK_D=triton.next_power_of_2(d), num_warps=2,
    )  # fmt: skip


@triton.jit
def _write(
    k, v, k_rows, v_rows, slots, k_stride, v_stride, heads,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < heads) & (dim < D)
    row = tl.load(slots + n * heads + head, mask=head < heads, other=0) * D
    tl.store(k_rows + row + dim, tl.load(k + n * k_stride + head * D + dim, mask=mask), mask=mask)
    tl.store(v_rows + row + dim, tl.load(v + n * v_stride + head * D + dim, mask=mask), mask=mask)


def noise_ahead(request_keys: Tensor, positions: Tensor, count: int, vocab: int) -> Tensor:
    """As `kernels.noise.noise_ahead`: request_keys int64 and positions int [B] -> float32 [B, count, vocab]"""
    batch = len(request_keys)
    out = torch.empty(batch, count, vocab, dtype=torch.float32, device=request_keys.device)
    _noise[(batch * count, triton.cdiv(vocab, ELEMENTWISE_BLOCK))](
        request_keys,
        positions,
        out,
        request_keys.stride(0),
        positions.stride(0),
        count,
        vocab,
        BLOCK=ELEMENTWISE_BLOCK,
        num_warps=4,
    )
    return out


@triton.jit
def _noise(keys, positions, out, keys_stride, positions_stride, count, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    b = row // count
    position = tl.load(positions + b * positions_stride).to(tl.int64) + row % count
    key = _mix(tl.load(keys + b * keys_stride) + (position + 1) * _GOLDEN)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * vocab + i, _gumbel(key, i), mask=i < vocab)


@triton.jit
def _gumbel(key, i):
    """The noise of tokens i at the position with this key, as `kernels.noise.gumbel`."""
    bits = (_mix(key + (i + 1).to(tl.int64) * _GOLDEN) >> 32) & 0xFFFFFFFF
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # log1p(-u) = log(1 - u) * (-u) / ((1 - u) - 1), which corrects for the rounding of 1 - u.
    complement = 1.0 - u
    rounded = tl.where(complement == 1.0, 1.0, complement - 1.0)
    log1p = tl.where(complement == 1.0, -u, tl.log(complement) * (-u / rounded))
    return -tl.log(-log1p)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser on int64. Right shifts of signed numbers copy the sign bit, which the masks remove."""
    x = (((x >> 30) & 0x3FFFFFFFF) ^ x) * _MIX1
    x = (((x >> 27) & 0x1FFFFFFFFF) ^ x) * _MIX2
    return ((x >> 31) & 0x1FFFFFFFF) ^ x
