"""The GPU form of `hopper.epilogue`: partial sums are added up in order, then come the small operations that follow."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device import use_pdl
from paceline.kernels.hopper.epilogue import DeferredNorm, HeadNorms, KVRows
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor


def add_norm(parts: Tensor, residual: Tensor, bias: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `hopper.epilogue.add_norm`."""
    splits, rows, size = parts.shape
    x, normed = (torch.empty(rows, size, dtype=residual.dtype, device=residual.device) for _ in range(2))
    block = triton.next_power_of_2(size)
    pdl = use_pdl(x.device)
    _add_norm[(rows,)](
        parts, residual, bias, weight, x, normed, residual.stride(0), rows, size, eps,
        SPLITS=splits, BIAS=bias is not None, BLOCK=block, PDL=pdl,
        num_warps=max(1, min(16, block // 256)), launch_pdl=pdl,
    )  # fmt: skip
    return x, normed


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    parts, residual, bias, weight, x, normed, residual_stride, rows, size, eps,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < size
    scale = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    total = sum_parts(
        parts + row * size, rows * size, residual + row * residual_stride, bias, size, SPLITS, BIAS, BLOCK
    )
    value = total.to(x.dtype.element_ty)
    tl.store(x + row * size + i, value, mask=mask)
    tl.store(normed + row * size + i, rms_norm_row(value, scale, size, eps), mask=mask)


@triton.jit
def sum_parts(
    parts, stride, residual, bias, size, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """sum(parts) + residual (+ bias) of one row, in this order: float32 [BLOCK]. Parts are `stride` numbers apart."""
    i = tl.arange(0, BLOCK)
    mask = i < size
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(SPLITS):
        total += tl.load(parts + s * stride + i, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + i, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + i, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def rms_norm_row(row, scale, size, eps):
    """row / sqrt(mean(row^2) + eps) * scale, in the type of the row."""
    value = row.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    return (value * inverse_rms * scale).to(row.dtype)


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up in the type of both, rounded where the reference rounds."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    return (silu * up.to(tl.float32)).to(gate.dtype)


def rope_and_cache(
    parts: Tensor,
    bias: Tensor | None,
    norms: HeadNorms | None,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    cache: KVRows,
    deferred: DeferredNorm | None = None,
) -> Tensor:
    """As `hopper.epilogue.rope_and_cache`."""
    splits, rows, _ = parts.shape
    d = cos.shape[-1]
    all_heads = heads[0] + 2 * heads[1]
    out = torch.empty(rows, all_heads, d, dtype=cos.dtype, device=cos.device)
    block_h = 4  # heads per program
    pdl = use_pdl(cos.device)
    _rope_and_cache[(rows, triton.cdiv(all_heads, block_h))](
        parts, bias, *(norms or (None, None, 0.0)), cos, sin, out, cache.k_rows, cache.v_rows, cache.slots,
        cos.stride(0), sin.stride(0), rows,
        HEADS=heads[0], KV_HEADS=heads[1], SPLITS=splits, BIAS=bias is not None, NORM=norms is not None,
        D=d, BLOCK_H=block_h, BLOCK_D=triton.next_power_of_2(d // 2), PDL=pdl, num_warps=2, launch_pdl=pdl,
        **deferred_args(deferred),
    )  # fmt: skip
    return out


def deferred_args(deferred: DeferredNorm | None) -> dict[str, Tensor | float | None]:
    """The arguments of a kernel that multiplies a matmul's rows by a deferred 1/rms; DEFERRED is 0 if mask is none,
    else the block that all parts of `squares` fit in."""
    if deferred is None:
        return {"squares": None, "square_parts": 0, "row_size": 1, "deferred_eps": 0.0, "DEFERRED": 0}
    parts = len(deferred.squares)
    block = triton.next_power_of_2(parts)
    row = {"square_parts": parts, "row_size": deferred.size, "deferred_eps": deferred.eps}
    return {"squares": deferred.squares, **row, "DEFERRED": block}


@triton.jit
def load_squares(squares, parts, rows, row, BLOCK: tl.constexpr):
    """The sums of squares float32 [BLOCK, len(row)]: loaded early, and added up by `inverse_rms_of` when needed."""
    part = tl.arange(0, BLOCK)[:, None]
    return tl.load(squares + part * rows + row[None, :], mask=part < parts, other=0.0)


@triton.jit
def inverse_rms_of(squares, size, eps):
    """1 / sqrt(sum of squares / size + eps)"""
    return tl.rsqrt(tl.sum(squares, 0) / size + eps)


@triton.jit(do_not_specialize=["rows", "square_parts", "row_size"])
def _rope_and_cache(
    parts, bias, q_norm, k_norm, eps, cos, sin, out, k_rows, v_rows, slots, cos_stride, sin_stride, rows,
    squares, square_parts, row_size, deferred_eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    DEFERRED: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    low = tl.arange(0, BLOCK_D)[None, :]  # dimension i of a head is rotated with i + D / 2
    high = low + D // 2
    in_head = low < D // 2
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    mask = (head < all_heads) & in_head
    wait_for_predecessor(PDL)
    kind = out.dtype.element_ty
    a = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    b = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for s in tl.static_range(SPLITS):
        at = parts + (s * rows + row) * all_heads * D + head * D
        a += tl.load(at + low, mask=mask, other=0.0).to(tl.float32)
        b += tl.load(at + high, mask=mask, other=0.0).to(tl.float32)
    if DEFERRED:
        part = tl.arange(0, DEFERRED)
        sums = tl.load(squares + part * rows + row, mask=part < square_parts, other=0.0)
        inverse_rms = inverse_rms_of(sums, row_size, deferred_eps)
        a *= inverse_rms
        b *= inverse_rms
    if BIAS:
        a += tl.load(bias + head * D + low, mask=mask, other=0.0).to(tl.float32)
        b += tl.load(bias + head * D + high, mask=mask, other=0.0).to(tl.float32)
    plain_a, plain_b = a.to(kind), b.to(kind)
    a, b = plain_a.to(tl.float32), plain_b.to(tl.float32)
    if NORM:
        inverse_rms = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        is_q = head < HEADS
        a = _scaled(a, inverse_rms, q_norm + low, k_norm + low, is_q, in_head, kind)
        b = _scaled(b, inverse_rms, q_norm + high, k_norm + high, is_q, in_head, kind)
    cos += row * cos_stride
    sin += row * sin_stride
    is_rotated = head < HEADS + KV_HEADS
    value_a = tl.where(is_rotated, _rotated(a, b, cos + low, sin + low, in_head, kind), plain_a)
    value_b = tl.where(is_rotated, _rotated(b, a, cos + high, sin + high, in_head, kind), plain_b)
    to = out + (row * all_heads + head) * D
    tl.store(to + low, value_a, mask=mask)
    tl.store(to + high, value_b, mask=mask)
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < all_heads)
    kv_head = tl.where(is_k, head - HEADS, head - HEADS - KV_HEADS)
    slot = tl.load(slots + row * KV_HEADS + kv_head, mask=is_k | is_v, other=0) * D
    tl.store(k_rows + slot + low, value_a, mask=mask & is_k)
    tl.store(k_rows + slot + high, value_b, mask=mask & is_k)
    tl.store(v_rows + slot + low, value_a, mask=mask & is_v)
    tl.store(v_rows + slot + high, value_b, mask=mask & is_v)


@triton.jit
def _scaled(value, inverse_rms, q_norm, k_norm, is_q, mask, kind: tl.constexpr):
    scale = tl.where(is_q, tl.load(q_norm, mask=mask, other=0.0), tl.load(k_norm, mask=mask, other=0.0))
    return (value * inverse_rms * scale.to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def _rotated(value, other, cos, sin, mask, kind: tl.constexpr):
    c = tl.load(cos, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin, mask=mask, other=0.0).to(tl.float32)
    return ((value * c).to(kind).to(tl.float32) + other * s).to(kind)


def concat_norm(tokens: Tensor, table: Tensor, table_norm: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """As `hopper.epilogue.concat_norm`."""
    rows, size = x.shape
    out = torch.empty(rows, 2 * size, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    pdl = use_pdl(x.device)
    _concat_norm[(rows, 2)](
        tokens, table, table_norm, x, norm, out, tokens.stride(0), table.stride(0), x.stride(0), size, eps,
        BLOCK=block, PDL=pdl, num_warps=max(1, min(16, block // 256)), launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _concat_norm(
    tokens, table, table_norm, x, norm, out, tokens_stride, table_stride, x_stride, size, eps,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)  # 0: the embedding, 1: x
    i = tl.arange(0, BLOCK)
    mask = i < size
    wait_for_predecessor(PDL)
    if half == 0:
        token = tl.load(tokens + row * tokens_stride).to(tl.int64)
        value = tl.load(table + token * table_stride + i, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(table_norm + i, mask=mask, other=0.0).to(tl.float32)
    else:
        value = tl.load(x + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(norm + i, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    tl.store(out + (row * 2 + half) * size + i, (value * inverse_rms * scale).to(out.dtype.element_ty), mask=mask)
