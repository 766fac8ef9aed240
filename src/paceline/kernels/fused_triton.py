"""Small operations of a decode step, each as one GPU kernel instead of several.

A step of a small model is hundreds of kernels that each do almost nothing, so their number is what it costs. What these
compute is what their PyTorch forms do, intermediate roundings included: `model.rope.rotate`, `model.decoder.gated`,
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
BLOCK = 1024


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, d], whose heads lie side by side; cos and sin [N, 1, d] -> [N, heads, d]"""
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
    there = (head < heads) & (dim < D)
    straight = tl.load(x + n * x_stride + head * D + dim, mask=there, other=0.0)
    crossed = tl.load(x + n * x_stride + head * D + (dim + D // 2) % D, mask=there, other=0.0)
    c = tl.load(cos + n * cos_stride + dim, mask=dim < D, other=0.0).to(tl.float32)
    s = tl.load(sin + n * sin_stride + dim, mask=dim < D, other=0.0).to(tl.float32)
    first = (straight.to(tl.float32) * c).to(out.dtype.element_ty).to(tl.float32)
    turned = first + crossed.to(tl.float32) * s
    tl.store(out + (n * heads + head) * D + dim, turned.to(out.dtype.element_ty), mask=there)


def gated(both: Tensor) -> Tensor:
    """[N, 2 * size], gate beside up -> silu(gate) * up, [N, size]"""
    n, size = both.shape[0], both.shape[1] // 2
    out = torch.empty(n, size, dtype=both.dtype, device=both.device)
    _gated[(n, triton.cdiv(size, BLOCK))](both, out, size, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def _gated(both, out, size, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < size
    gate = tl.load(both + n * 2 * size + i, mask=there, other=0.0)
    up = tl.load(both + n * 2 * size + size + i, mask=there, other=0.0)
    tl.store(out + n * size + i, silu_times(gate, up), mask=there)


def write(k: Tensor, v: Tensor, k_rows: Tensor, v_rows: Tensor, slots: Tensor) -> None:
    """Put k and v [N, kv_heads, d] into the rows `slots` [N * kv_heads] of [rows, d]."""
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
    there = (head < heads) & (dim < D)
    row = tl.load(slots + n * heads + head, mask=head < heads, other=0) * D
    tl.store(k_rows + row + dim, tl.load(k + n * k_stride + head * D + dim, mask=there), mask=there)
    tl.store(v_rows + row + dim, tl.load(v + n * v_stride + head * D + dim, mask=there), mask=there)


def noise_ahead(request_keys: Tensor, places: Tensor, count: int, vocab: int) -> Tensor:
    """request_keys int64 and places int [B] -> noise float32 [B, count, vocab] of `count` places from each on"""
    batch = len(request_keys)
    out = torch.empty(batch, count, vocab, dtype=torch.float32, device=request_keys.device)
    _noise[(batch * count, triton.cdiv(vocab, BLOCK))](
        request_keys, places, out, request_keys.stride(0), places.stride(0), count, vocab, BLOCK=BLOCK, num_warps=4
    )
    return out


@triton.jit
def _noise(keys, places, out, keys_stride, places_stride, count, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    b = row // count
    place = tl.load(places + b * places_stride).to(tl.int64) + row % count
    key = _mix(tl.load(keys + b * keys_stride) + (place + 1) * _GOLDEN)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * vocab + i, _gumbel(key, i), mask=i < vocab)


@triton.jit
def _gumbel(key, i):
    """The noise of tokens i at the place with this key."""
    bits = (_mix(key + (i + 1).to(tl.int64) * _GOLDEN) >> 32) & 0xFFFFFFFF
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # log1p(-u): what 1 - u loses by rounding is made up by dividing by what is left of u.
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, 1.0, rest - 1.0)
    log1p = tl.where(rest == 1.0, -u, tl.log(rest) * (-u / lost))
    return -tl.log(-log1p)


@triton.jit
def _mix(x):
    """Shifts of signed numbers drag copies of the sign along, which the masks take away."""
    x = (((x >> 30) & 0x3FFFFFFFF) ^ x) * _MIX1
    x = (((x >> 27) & 0x1FFFFFFFFF) ^ x) * _MIX2
    return ((x >> 31) & 0x1FFFFFFFF) ^ x
