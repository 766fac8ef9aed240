"""The GPU form of `kernels.normed`: every program adds up the row and makes its norm, which the cache has for all.

A program's weights are all of its rows at once, or a block of them after the other. Launched early, it takes the first
before its turn and has them when the row is ready; of those that follow it always has the next on their way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device import starts_early
from paceline.kernels.hopper.epilogue_triton import add_up, norm_of, silu_times
from paceline.kernels.hopper.matmul import Tile
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor

if TYPE_CHECKING:
    from paceline.kernels.hopper.normed_matmul import ResidualStream, RopeArgs


def norm_qkv_matmul(
    stream: ResidualStream, norm: Tensor, eps: float, weight: Tensor, turn: RopeArgs, tile: Tile
) -> tuple[Tensor, Tensor]:
    """As `kernels.normed.norm_heads`, without norms of queries and keys."""
    size, (heads, kv_heads), d = weight.shape[1], turn.heads, turn.cos.shape[-1]
    every, half = heads + 2 * kv_heads, d // 2
    pairs = min(tile.block_n, half & -half)  # a power of two that goes into half a head
    x = torch.empty(1, size, dtype=stream.x.dtype, device=weight.device)
    out = torch.empty(1, every, d, dtype=x.dtype, device=x.device)
    early = starts_early(x.device)
    _norm_qkv_matmul[(every * half // pairs,)](
        *_row(stream), norm, x, weight, turn.bias, turn.cos, turn.sin, out, *turn.cache, size, weight.stride(0), eps,
        HEADS=heads, KV_HEADS=kv_heads, D=d, BIASED=turn.bias is not None, PAIRS=pairs, **_sizes(stream, size),
        PDL=early, num_warps=tile.warps, launch_pdl=early,
    )  # fmt: skip
    return x, out


def norm_gated_matmul(
    stream: ResidualStream, norm: Tensor, eps: float, weight: Tensor, tile: Tile
) -> tuple[Tensor, Tensor]:
    """As `kernels.normed.norm_gated`, without a bias."""
    half, size = weight.shape[0] // 2, weight.shape[1]
    x = torch.empty(1, size, dtype=stream.x.dtype, device=weight.device)
    out = torch.empty(1, half, dtype=x.dtype, device=x.device)
    early = starts_early(x.device)
    _norm_gated_matmul[(triton.cdiv(half, tile.block_n * tile.turns),)](
        *_row(stream), norm, x, weight, out, half, size, weight.stride(0), eps,
        BLOCK_N=tile.block_n, TURNS=tile.turns, **_sizes(stream, size), PDL=early,
        num_warps=tile.warps, launch_pdl=early,
    )  # fmt: skip
    return x, out


def _row(stream: ResidualStream) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return stream.x, stream.parts, stream.bias


def _sizes(stream: ResidualStream, size: int) -> dict[str, int | bool]:
    splits = 0 if stream.parts is None else len(stream.parts)
    return {"SPLITS": splits, "ADDED": stream.bias is not None, "BLOCK": triton.next_power_of_2(size)}


@triton.jit
def _normed(
    residual, parts, added, norm, x, size, eps,
    SPLITS: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Wait for the row, and make its norm, float32 [BLOCK]; the first program leaves the row in x."""
    i = tl.arange(0, BLOCK)
    scale = tl.load(norm + i, mask=i < size, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    row = add_up(parts, size, residual, added, size, SPLITS, ADDED, BLOCK).to(x.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(x + i, row, mask=i < size)
    return norm_of(row, scale, size, eps).to(tl.float32)


@triton.jit
def _taken(weight, row, size, BLOCK: tl.constexpr):
    """Whole rows of a weight, which are read once."""
    i = tl.arange(0, BLOCK)
    there = (i < size)[None, :]
    return tl.load(weight + row[:, None] + i[None, :], mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit
def _times(weights, normed):
    return tl.sum(weights.to(tl.float32) * normed[None, :], 1)


@triton.jit
def _norm_qkv_matmul(
    residual, parts, added, norm, x, weight, bias, cos, sin, out, k_rows, v_rows, slots, size, weight_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr, PAIRS: tl.constexpr,
    SPLITS: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program makes numbers of a head and those half a head further, which are turned with them."""
    half: tl.constexpr = D // 2
    head = tl.program_id(0) * PAIRS // half
    dim = tl.program_id(0) * PAIRS % half + tl.arange(0, PAIRS)
    place = head * D + dim
    wide = place.to(tl.int64) * weight_stride
    near = _taken(weight, wide, size, BLOCK)
    far = _taken(weight + half * weight_stride, wide, size, BLOCK)
    normed = _normed(residual, parts, added, norm, x, size, eps, SPLITS, ADDED, BLOCK, PDL)
    first, second = _times(near, normed), _times(far, normed)
    if BIASED:
        first += tl.load(bias + place).to(tl.float32)
        second += tl.load(bias + place + half).to(tl.float32)
    kind = out.dtype.element_ty
    first, second = first.to(kind), second.to(kind)
    a, b = first.to(tl.float32), second.to(tl.float32)
    turned_a = (a * tl.load(cos + dim).to(tl.float32)).to(kind).to(tl.float32) + b * tl.load(sin + dim).to(tl.float32)
    turned_b = (b * tl.load(cos + dim + half).to(tl.float32)).to(kind).to(tl.float32)
    turned_b += a * tl.load(sin + dim + half).to(tl.float32)
    turns = head < HEADS + KV_HEADS
    first, second = tl.where(turns, turned_a.to(kind), first), tl.where(turns, turned_b.to(kind), second)
    tl.store(out + place, first)
    tl.store(out + place + half, second)
    if head >= HEADS:
        which = (head - HEADS) % KV_HEADS
        to = tl.load(slots + which) * D + dim
        if turns:
            tl.store(k_rows + to, first)
            tl.store(k_rows + to + half, second)
        else:
            tl.store(v_rows + to, first)
            tl.store(v_rows + to + half, second)


@triton.jit
def _norm_gated_matmul(
    residual, parts, added, norm, x, weight, out, half, size, weight_stride, eps,
    BLOCK_N: tl.constexpr, TURNS: tl.constexpr, SPLITS: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N * TURNS + tl.arange(0, BLOCK_N)
    below = weight + half.to(tl.int64) * weight_stride
    wide = tl.minimum(n, half - 1).to(tl.int64) * weight_stride
    gates, ups = _taken(weight, wide, size, BLOCK), _taken(below, wide, size, BLOCK)
    normed = _normed(residual, parts, added, norm, x, size, eps, SPLITS, ADDED, BLOCK, PDL)
    kind = out.dtype.element_ty
    for turn in tl.static_range(TURNS):
        now_gates, now_ups = gates, ups
        if turn + 1 < TURNS:
            wide = tl.minimum(n + BLOCK_N, half - 1).to(tl.int64) * weight_stride
            gates, ups = _taken(weight, wide, size, BLOCK), _taken(below, wide, size, BLOCK)
        gate, up = _times(now_gates, normed).to(kind), _times(now_ups, normed).to(kind)
        tl.store(out + n, silu_times(gate, up), mask=n < half)
        n += BLOCK_N
