"""The GPU form of `hopper.normed_matmul` for a single row: every program sums the row and computes its norm, reading it
from the L2 cache.

A program holds whole rows of the weight, all at once or block after block. It loads the first block before it waits for
its predecessor (PDL), and each next one before it computes with the present one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device import use_pdl
from paceline.kernels.hopper.epilogue_triton import rms_norm_row, silu_times, sum_parts
from paceline.kernels.hopper.matmul import Tile
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor

if TYPE_CHECKING:
    from paceline.kernels.hopper.normed_matmul import ResidualStream, RopeArgs


def norm_qkv_matmul(
    stream: ResidualStream, norm: Tensor, eps: float, weight: Tensor, rope: RopeArgs, tile: Tile
) -> tuple[Tensor, Tensor]:
    """As `hopper.normed_matmul.norm_qkv_matmul`, without norms of queries and keys."""
    size = weight.shape[1]
    heads, kv_heads = rope.heads
    d = rope.cos.shape[-1]
    all_heads = heads + 2 * kv_heads
    half = d // 2
    pairs = min(tile.block_n, half & -half)  # rotated pairs per program: a power of two that divides half a head
    x = torch.empty(1, size, dtype=stream.x.dtype, device=weight.device)
    out = torch.empty(1, all_heads, d, dtype=x.dtype, device=x.device)
    pdl = use_pdl(x.device)
    _norm_qkv_matmul[(all_heads * half // pairs,)](
        *_row(stream), norm, x, weight, rope.bias, rope.cos, rope.sin, out, *rope.cache, size, weight.stride(0), eps,
        HEADS=heads, KV_HEADS=kv_heads, D=d, BIASED=rope.bias is not None, PAIRS=pairs, **_sizes(stream, size),
        PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    return x, out


def norm_gated_matmul(
    stream: ResidualStream, norm: Tensor, eps: float, weight: Tensor, tile: Tile
) -> tuple[Tensor, Tensor]:
    """As `hopper.normed_matmul.norm_gated_matmul`, without a bias."""
    half, size = weight.shape[0] // 2, weight.shape[1]
    x = torch.empty(1, size, dtype=stream.x.dtype, device=weight.device)
    out = torch.empty(1, half, dtype=x.dtype, device=x.device)
    pdl = use_pdl(x.device)
    _norm_gated_matmul[(triton.cdiv(half, tile.block_n * tile.blocks),)](
        *_row(stream), norm, x, weight, out, half, size, weight.stride(0), eps,
        BLOCK_N=tile.block_n, BLOCKS=tile.blocks, **_sizes(stream, size), PDL=pdl,
        num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    return x, out


def _row(stream: ResidualStream) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return stream.x, stream.parts, stream.bias


def _sizes(stream: ResidualStream, size: int) -> dict[str, int | bool]:
    splits = 0 if stream.parts is None else len(stream.parts)
    return {"SPLITS": splits, "RESIDUAL_BIAS": stream.bias is not None, "BLOCK": triton.next_power_of_2(size)}


@triton.jit
def _normed(
    residual, parts, residual_bias, norm, x, size, eps,
    SPLITS: tl.constexpr, RESIDUAL_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Wait for the predecessor, sum the row and norm it, float32 [BLOCK]; the first program writes the sum to x."""
    i = tl.arange(0, BLOCK)
    scale = tl.load(norm + i, mask=i < size, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    row = sum_parts(parts, size, residual, residual_bias, size, SPLITS, RESIDUAL_BIAS, BLOCK).to(x.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(x + i, row, mask=i < size)
    return rms_norm_row(row, scale, size, eps).to(tl.float32)


@triton.jit
def _load_weights(weight, row, size, BLOCK: tl.constexpr):
    """Whole rows of a weight, at the offsets `row`; they are read once, so the cache need not keep them."""
    i = tl.arange(0, BLOCK)
    mask = (i < size)[None, :]
    return tl.load(weight + row[:, None] + i[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _dot(weights, normed):
    """weights [n, BLOCK] times normed [BLOCK] -> float32 [n]"""
    return tl.sum(weights.to(tl.float32) * normed[None, :], 1)


@triton.jit
def _norm_qkv_matmul(
    residual, parts, residual_bias, norm, x, weight, bias, cos, sin, out, k_rows, v_rows, slots,
    size, weight_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr, PAIRS: tl.constexpr,
    SPLITS: tl.constexpr, RESIDUAL_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program computes PAIRS dimensions of a head and those half a head further, which they are rotated with."""
    half: tl.constexpr = D // 2
    head = tl.program_id(0) * PAIRS // half
    dim = tl.program_id(0) * PAIRS % half + tl.arange(0, PAIRS)
    column = head * D + dim
    row = column.to(tl.int64) * weight_stride
    first_weights = _load_weights(weight, row, size, BLOCK)
    second_weights = _load_weights(weight + half * weight_stride, row, size, BLOCK)
    normed = _normed(residual, parts, residual_bias, norm, x, size, eps, SPLITS, RESIDUAL_BIAS, BLOCK, PDL)
    first, second = _dot(first_weights, normed), _dot(second_weights, normed)
    if BIASED:
        first += tl.load(bias + column).to(tl.float32)
        second += tl.load(bias + column + half).to(tl.float32)
    kind = out.dtype.element_ty
    first, second = first.to(kind), second.to(kind)
    a, b = first.to(tl.float32), second.to(tl.float32)
    rotated_a = (a * tl.load(cos + dim).to(tl.float32)).to(kind).to(tl.float32) + b * tl.load(sin + dim).to(tl.float32)
    rotated_b = (b * tl.load(cos + dim + half).to(tl.float32)).to(kind).to(tl.float32)
    rotated_b += a * tl.load(sin + dim + half).to(tl.float32)
    is_rotated = head < HEADS + KV_HEADS
    first, second = tl.where(is_rotated, rotated_a.to(kind), first), tl.where(is_rotated, rotated_b.to(kind), second)
    tl.store(out + column, first)
    tl.store(out + column + half, second)
    if head >= HEADS:
        kv_head = (head - HEADS) % KV_HEADS
        to = tl.load(slots + kv_head) * D + dim
        if is_rotated:
            tl.store(k_rows + to, first)
            tl.store(k_rows + to + half, second)
        else:
            tl.store(v_rows + to, first)
            tl.store(v_rows + to + half, second)


@triton.jit
def _norm_gated_matmul(
    residual, parts, residual_bias, norm, x, weight, out, half, size, weight_stride, eps,
    BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr, RESIDUAL_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N * BLOCKS + tl.arange(0, BLOCK_N)
    up_weight = weight + half.to(tl.int64) * weight_stride
    row = tl.minimum(n, half - 1).to(tl.int64) * weight_stride
    gates, ups = _load_weights(weight, row, size, BLOCK), _load_weights(up_weight, row, size, BLOCK)
    normed = _normed(residual, parts, residual_bias, norm, x, size, eps, SPLITS, RESIDUAL_BIAS, BLOCK, PDL)
    kind = out.dtype.element_ty
    for block in tl.static_range(BLOCKS):
        now_gates, now_ups = gates, ups
        if block + 1 < BLOCKS:
            row = tl.minimum(n + BLOCK_N, half - 1).to(tl.int64) * weight_stride
            gates, ups = _load_weights(weight, row, size, BLOCK), _load_weights(up_weight, row, size, BLOCK)
        gate, up = _dot(now_gates, normed).to(kind), _dot(now_ups, normed).to(kind)
        tl.store(out + n, silu_times(gate, up), mask=n < half)
        n += BLOCK_N
