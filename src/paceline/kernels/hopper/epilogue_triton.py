"""The GPU form of what follows a product: partial sums added up in order, and the small operations behind them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device import starts_early
from paceline.kernels.hopper.epilogue import DeferredNorm, HeadNorms, KVRows
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor


def add_norm(parts: Tensor, residual: Tensor, bias: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `kernels.epilogue.add_norm`."""
    splits, rows, size = parts.shape
    x, normed = (torch.empty(rows, size, dtype=residual.dtype, device=residual.device) for _ in range(2))
    block, early = triton.next_power_of_2(size), starts_early(x.device)
    _add_norm[(rows,)](
        parts, residual, bias, weight, x, normed, residual.stride(0), rows, size, eps,
        SPLITS=splits, BIAS=bias is not None, BLOCK=block, PDL=early,
        num_warps=max(1, min(16, block // 256)), launch_pdl=early,
    )  # fmt: skip
    return x, normed


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    parts, residual, bias, weight, x, normed, residual_stride, rows, size, eps,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    there = i < size
    scale = tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    total = add_up(parts + row * size, rows * size, residual + row * residual_stride, bias, size, SPLITS, BIAS, BLOCK)
    value = total.to(x.dtype.element_ty)
    tl.store(x + row * size + i, value, mask=there)
    tl.store(normed + row * size + i, norm_of(value, scale, size, eps), mask=there)


@triton.jit
def add_up(
    parts, stride, residual, bias, size, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Partial sums of a row, `stride` apart, and what else is added to them, in order: float32 [BLOCK]."""
    i = tl.arange(0, BLOCK)
    there = i < size
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(SPLITS):
        total += tl.load(parts + s * stride + i, mask=there, other=0.0).to(tl.float32)
    total += tl.load(residual + i, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + i, mask=there, other=0.0).to(tl.float32)
    return total


@triton.jit
def norm_of(row, scale, size, eps):
    """In the type of the row."""
    value = row.to(tl.float32)
    root = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    return (value * root * scale).to(row.dtype)


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up in the type of both, rounded where the plain form rounds."""
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
    scale: DeferredNorm | None = None,
) -> Tensor:
    """As `kernels.epilogue.turn_and_keep`."""
    splits, rows, _ = parts.shape
    d, every = cos.shape[-1], heads[0] + 2 * heads[1]
    out = torch.empty(rows, every, d, dtype=cos.dtype, device=cos.device)
    block_h, early = 4, starts_early(cos.device)  # heads per program
    _rope_and_cache[(rows, triton.cdiv(every, block_h))](
        parts, bias, *(norms or (None, None, 0.0)), cos, sin, out, cache.k_rows, cache.v_rows, cache.slots,
        cos.stride(0), sin.stride(0), rows,
        HEADS=heads[0], KV_HEADS=heads[1], SPLITS=splits, BIAS=bias is not None, NORM=norms is not None,
        D=d, BLOCK_H=block_h, BLOCK_D=triton.next_power_of_2(d // 2), PDL=early, num_warps=2, launch_pdl=early,
        **scale_args(scale),
    )  # fmt: skip
    return out


def scale_args(scale: DeferredNorm | None) -> dict[str, Tensor | float | None]:
    """As kernels take it that may have to multiply a product by it."""
    if scale is None:
        return {"squares": None, "square_parts": 0, "row_size": 1, "scale_eps": 0.0, "SCALE": 0}
    parts = len(scale.squares)
    block = triton.next_power_of_2(parts)
    row = {"square_parts": parts, "row_size": scale.size, "scale_eps": scale.eps}
    return {"squares": scale.squares, **row, "SCALE": block}


@triton.jit
def squares_of(squares, parts, rows, row, BLOCK: tl.constexpr):
    """Asked for early, and added up when they are needed: float32 [BLOCK, len(row)]."""
    part = tl.arange(0, BLOCK)[:, None]
    return tl.load(squares + part * rows + row[None, :], mask=part < parts, other=0.0)


@triton.jit
def root_of(squares, size, eps):
    return tl.rsqrt(tl.sum(squares, 0) / size + eps)


@triton.jit(do_not_specialize=["rows", "square_parts", "row_size"])
def _rope_and_cache(
    parts, bias, q_norm, k_norm, eps, cos, sin, out, k_rows, v_rows, slots, cos_stride, sin_stride, rows,
    squares, square_parts, row_size, scale_eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    SCALE: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    low = tl.arange(0, BLOCK_D)[None, :]  # numbers of a head, each with the one that it is turned with, half a head on
    high = low + D // 2
    in_head = low < D // 2
    every: tl.constexpr = HEADS + 2 * KV_HEADS
    there = (head < every) & in_head
    wait_for_predecessor(PDL)
    kind = out.dtype.element_ty
    a = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    b = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for s in tl.static_range(SPLITS):
        at = parts + (s * rows + row) * every * D + head * D
        a += tl.load(at + low, mask=there, other=0.0).to(tl.float32)
        b += tl.load(at + high, mask=there, other=0.0).to(tl.float32)
    if SCALE:
        part = tl.arange(0, SCALE)
        sums = tl.load(squares + part * rows + row, mask=part < square_parts, other=0.0)
        root = root_of(sums, row_size, scale_eps)
        a *= root
        b *= root
    if BIAS:
        a += tl.load(bias + head * D + low, mask=there, other=0.0).to(tl.float32)
        b += tl.load(bias + head * D + high, mask=there, other=0.0).to(tl.float32)
    plain_a, plain_b = a.to(kind), b.to(kind)
    a, b = plain_a.to(tl.float32), plain_b.to(tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        is_q = head < HEADS
        a = _scaled(a, root, q_norm + low, k_norm + low, is_q, in_head, kind)
        b = _scaled(b, root, q_norm + high, k_norm + high, is_q, in_head, kind)
    cos += row * cos_stride
    sin += row * sin_stride
    turned = head < HEADS + KV_HEADS
    value_a = tl.where(turned, _rotated(a, b, cos + low, sin + low, in_head, kind), plain_a)
    value_b = tl.where(turned, _rotated(b, a, cos + high, sin + high, in_head, kind), plain_b)
    to = out + (row * every + head) * D
    tl.store(to + low, value_a, mask=there)
    tl.store(to + high, value_b, mask=there)
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < every)
    which = tl.where(is_k, head - HEADS, head - HEADS - KV_HEADS)
    place = tl.load(slots + row * KV_HEADS + which, mask=is_k | is_v, other=0) * D
    tl.store(k_rows + place + low, value_a, mask=there & is_k)
    tl.store(k_rows + place + high, value_b, mask=there & is_k)
    tl.store(v_rows + place + low, value_a, mask=there & is_v)
    tl.store(v_rows + place + high, value_b, mask=there & is_v)


@triton.jit
def _scaled(value, root, q_norm, k_norm, is_q, mask, kind: tl.constexpr):
    scale = tl.where(is_q, tl.load(q_norm, mask=mask, other=0.0), tl.load(k_norm, mask=mask, other=0.0))
    return (value * root * scale.to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def _rotated(value, other, cos, sin, mask, kind: tl.constexpr):
    c = tl.load(cos, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin, mask=mask, other=0.0).to(tl.float32)
    return ((value * c).to(kind).to(tl.float32) + other * s).to(kind)


def concat_norm(tokens: Tensor, table: Tensor, table_norm: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """As `kernels.epilogue.norm_beside`."""
    rows, size = x.shape
    out = torch.empty(rows, 2 * size, dtype=x.dtype, device=x.device)
    block, early = triton.next_power_of_2(size), starts_early(x.device)
    _concat_norm[(rows, 2)](
        tokens, table, table_norm, x, norm, out, tokens.stride(0), table.stride(0), x.stride(0), size, eps,
        BLOCK=block, PDL=early, num_warps=max(1, min(16, block // 256)), launch_pdl=early,
    )  # fmt: skip
    return out


@triton.jit
def _concat_norm(
    tokens, table, table_norm, x, norm, out, tokens_stride, table_stride, x_stride, size, eps,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    there = i < size
    wait_for_predecessor(PDL)
    if side == 0:
        token = tl.load(tokens + row * tokens_stride).to(tl.int64)
        value = tl.load(table + token * table_stride + i, mask=there, other=0.0).to(tl.float32)
        scale = tl.load(table_norm + i, mask=there, other=0.0).to(tl.float32)
    else:
        value = tl.load(x + row * x_stride + i, mask=there, other=0.0).to(tl.float32)
        scale = tl.load(norm + i, mask=there, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    tl.store(out + (row * 2 + side) * size + i, (value * root * scale).to(out.dtype.element_ty), mask=there)
