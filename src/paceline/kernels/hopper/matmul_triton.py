"""Matmuls of a few rows with a large weight, at the speed at which the weight can be read from memory.

A matmul of 1 to 64 rows is a read of its weights. The inner dimension is split over programs (split-K), so that small
weights keep all SMs busy too; the partial sums are float32, and the next kernel adds them up, in order, along with its
own work (`epilogue_triton`). Nothing is added by atomics, so the same input gives the same output.

With PDL (`device.pdl`) a kernel prefetches its first weights, which depend on no other kernel, before it waits for its
predecessor: they travel to the cache while that one is still running.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels import device
from paceline.kernels.hopper.epilogue import DeferredNorm
from paceline.kernels.hopper.epilogue_triton import deferred_args, inverse_rms_of, load_squares, silu_times
from paceline.kernels.hopper.matmul import Tile
from paceline.kernels.hopper.matmul_blocks_triton import (
    load_padded_rows,
    load_rows,
    load_weights,
    multiply_row,
    multiply_rows,
    prefetch,
    repeat_rows,
)
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor

CACHE_LINE = 128  # bytes


def split_k_matmul(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """As `hopper.matmul.split_k_matmul`: x [rows, in], weight [out, in] -> partial sums float32 [splits, rows, out]"""
    rows, size = x.shape
    out = weight.shape[0]
    part = torch.empty(tile.splits, rows, out, dtype=torch.float32, device=x.device)
    _split_k_matmul[(triton.cdiv(out, tile.block_n), tile.splits)](
        x, weight, part, x.stride(0), weight.stride(0), rows, out, size,
        tile.splits, BLOCK_M=block_rows(rows, tile), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        EVEN=size % tile.block_k == 0, WEIGHT_FIRST=tile.weight_first,
        PRECISION=_precision(x), PRELOAD=tile.preload, UNROLL=tile.unroll, **_launch(weight, tile),
    )  # fmt: skip
    return part


def residual_matmul(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None, norm: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """y = residual + x weight^T (+ bias) [rows, out], y * norm with norm [out], and the sums of squares of y over its
    blocks of columns, float32 [blocks, rows], from which `DeferredNorm` computes 1/rms."""
    rows, size = x.shape
    out = weight.shape[0]
    total, scaled = (torch.empty(rows, out, dtype=x.dtype, device=x.device) for _ in range(2))
    programs = triton.cdiv(out, tile.block_n)
    squares = torch.empty(programs, rows, dtype=torch.float32, device=x.device)
    _residual_matmul[(programs,)](
        x, weight, residual, bias, norm, total, scaled, squares,
        x.stride(0), weight.stride(0), residual.stride(0), rows, out, size,
        BLOCK_M=block_rows(rows, tile), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN=size % tile.block_k == 0,
        WEIGHT_FIRST=tile.weight_first, PRECISION=_precision(x), BIAS=bias is not None, **_launch(weight, tile),
    )  # fmt: skip
    return total, scaled, squares


def gated_matmul(x: Tensor, weight: Tensor, tile: Tile, deferred: DeferredNorm | None = None) -> Tensor:
    """x [rows, in], weight [2 * size, in], the rows of gate before those of up -> silu(x gate^T) * (x up^T),
    [rows, size]; both matmuls are multiplied by a deferred 1/rms first."""
    rows, size = x.shape
    half = weight.shape[0] // 2
    out = torch.empty(rows, half, dtype=x.dtype, device=x.device)
    _gated_matmul[(triton.cdiv(half, tile.block_n),)](
        x, weight, out, x.stride(0), weight.stride(0), rows, half, size,
        BLOCK_M=block_rows(rows, tile), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        EVEN=size % tile.block_k == 0, WEIGHT_FIRST=tile.weight_first, PRECISION=_precision(x),
        UNROLL=tile.unroll, **deferred_args(deferred), **_launch(weight, tile),
    )  # fmt: skip
    return out


def block_rows(rows: int, tile: Tile) -> int:
    """Tensor cores take 16 rows at least, or 8 as the second operand; a single row without them is a plain sum."""
    return 1 if tile.vector else max(8 if tile.weight_first else 16, triton.next_power_of_2(rows))


def _precision(x: Tensor) -> str:
    """Of tensor cores on float32 inputs; others have no choice."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _launch(weight: Tensor, tile: Tile) -> dict[str, int | bool]:
    pdl = device.use_pdl(weight.device)
    lines = prefetch_lines(weight, tile) if pdl and not tile.preload else 1
    return {"num_warps": tile.warps, "num_stages": tile.stages, "LINES": lines, "PDL": pdl, "launch_pdl": pdl}


def prefetch_lines(weight: Tensor, tile: Tile) -> int:
    """Cache lines of each of its weight rows that a program prefetches: a power of two, so that all programs together
    prefetch at most `device.prefetch_bytes`."""
    rows, size = weight.shape
    blocks = triton.cdiv(triton.cdiv(size, tile.block_k), tile.splits)
    whole_row = triton.next_power_of_2(triton.cdiv(blocks * tile.block_k * weight.element_size(), CACHE_LINE))
    allowed = device.prefetch_bytes // (rows * tile.splits * CACHE_LINE)
    return min(whole_row, 1 << max(0, allowed.bit_length() - 1))


@triton.jit(do_not_specialize=["rows", "splits"])
def _split_k_matmul(
    x, weight, part, x_stride, weight_stride, rows, out, size, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr, PRELOAD: tl.constexpr,
    UNROLL: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    blocks = tl.cdiv(size, BLOCK_K)
    per_split = tl.cdiv(blocks, splits)
    first = split * per_split * BLOCK_K
    last = tl.minimum(size, first + per_split * BLOCK_K)
    weight_row = tl.minimum(n, out - 1).to(tl.int64) * weight_stride  # rows beyond the last read it again
    if PRELOAD:
        k = first + tl.arange(0, BLOCK_K)
        at = weight + weight_row[:, None] + k[None, :]
        preloaded = tl.load(at, mask=(k < last)[None, :], other=0.0, eviction_policy="evict_first")
    elif PDL:
        prefetch(weight, weight_row, first, last, LINES)
    wait_for_predecessor(PDL)
    m = tl.arange(0, BLOCK_M)
    row = repeat_rows(m, rows) * x_stride
    begin = first
    if BLOCK_M == 1:
        lanes = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        if PRELOAD:
            lanes = preloaded.to(tl.float32) * tl.load(x + k, mask=k < last, other=0.0).to(tl.float32)[None, :]
            begin += BLOCK_K
        acc = tl.sum(multiply_row(lanes, x, weight, weight_row, begin, last, BLOCK_K, EVEN, UNROLL), 1)[:, None]
    else:
        if WEIGHT_FIRST:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if PRELOAD:
            a = tl.load(x + row[None, :] + k[:, None], mask=(k < last)[:, None], other=0.0)
            acc = tl.dot(preloaded, a, acc, input_precision=PRECISION)
            begin += BLOCK_K
        acc = multiply_rows(
            acc, x, weight, row, m < rows, weight_row, begin, last, BLOCK_K, EVEN, WEIGHT_FIRST, PRECISION
        )
    part += split.to(tl.int64) * rows * out
    if WEIGHT_FIRST or BLOCK_M == 1:
        to = part + m[None, :] * out + n[:, None]
        tl.store(to, acc, mask=(m < rows)[None, :] & (n < out)[:, None])
    else:
        to = part + m[:, None] * out + n[None, :]
        tl.store(to, acc, mask=(m < rows)[:, None] & (n < out)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _residual_matmul(
    x, weight, residual, bias, norm, total, scaled, squares, x_stride, weight_stride, residual_stride, rows, out, size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr, BIAS: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(n, out - 1).to(tl.int64) * weight_stride
    if PDL:
        prefetch(weight, weight_row, 0, size, LINES)
    norm_weight = tl.load(norm + n, mask=n < out, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    m = tl.arange(0, BLOCK_M)
    mask = (m < rows)[:, None] & (n < out)[None, :]
    stream = tl.load(residual + m[:, None] * residual_stride + n[None, :], mask=mask, other=0.0).to(tl.float32)
    row = repeat_rows(m, rows) * x_stride
    if WEIGHT_FIRST:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = multiply_rows(acc, x, weight, row, m < rows, weight_row, 0, size, BLOCK_K, EVEN, WEIGHT_FIRST, PRECISION)
    if WEIGHT_FIRST:
        acc = tl.trans(acc)
    acc += stream
    if BIAS:
        acc += tl.load(bias + n, mask=n < out, other=0.0).to(tl.float32)[None, :]
    kind = total.dtype.element_ty
    value = tl.where(mask, acc.to(kind), 0.0).to(kind)
    to = m[:, None] * out + n[None, :]
    tl.store(total + to, value, mask=mask)
    value = value.to(tl.float32)
    tl.store(scaled + to, (value * norm_weight[None, :]).to(kind), mask=mask)
    tl.store(squares + tl.program_id(0) * rows + m, tl.sum(value * value, 1), mask=m < rows)


@triton.jit(do_not_specialize=["rows", "square_parts", "row_size"])
def _gated_matmul(
    x, weight, out, x_stride, weight_stride, rows, half, size, squares, square_parts, row_size, deferred_eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr, DEFERRED: tl.constexpr,
    UNROLL: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program computes gate and up of its columns in one loop, so both halves of the weight are read at once."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(n, half - 1).to(tl.int64) * weight_stride
    up_weight = weight + half.to(tl.int64) * weight_stride
    if PDL:
        prefetch(weight, weight_row, 0, size, LINES)
        prefetch(up_weight, weight_row, 0, size, LINES)
    wait_for_predecessor(PDL)
    m = tl.arange(0, BLOCK_M)
    row = repeat_rows(m, rows) * x_stride
    if DEFERRED:
        sums = load_squares(squares, square_parts, rows, tl.minimum(m, rows - 1), DEFERRED)
    if BLOCK_M == 1:
        gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, size, BLOCK_K, loop_unroll_factor=UNROLL):
            k = start + tl.arange(0, BLOCK_K)
            at, mask = weight_row[:, None] + k[None, :], (k < size)[None, :]
            g, u = load_weights(weight + at, mask, EVEN), load_weights(up_weight + at, mask, EVEN)
            a = load_rows(x + k, k < size, EVEN).to(tl.float32)[None, :]
            gates += g.to(tl.float32) * a
            ups += u.to(tl.float32) * a
        gate, up = tl.sum(gates, 1)[:, None], tl.sum(ups, 1)[:, None]
    elif WEIGHT_FIRST:
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, size, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            at, mask = weight_row[:, None] + k[None, :], (k < size)[None, :]
            g, u = load_weights(weight + at, mask, EVEN), load_weights(up_weight + at, mask, EVEN)
            a = load_rows(x + row[None, :] + k[:, None], (k < size)[:, None], EVEN)
            gate = tl.dot(g, a, gate, input_precision=PRECISION)
            up = tl.dot(u, a, up, input_precision=PRECISION)
    else:
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, size, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            at, mask = weight_row[None, :] + k[:, None], (k < size)[:, None]
            g, u = load_weights(weight + at, mask, EVEN), load_weights(up_weight + at, mask, EVEN)
            a = load_padded_rows(x + row[:, None] + k[None, :], (m < rows)[:, None], (k < size)[None, :], EVEN)
            gate = tl.dot(a, g, gate, input_precision=PRECISION)
            up = tl.dot(a, u, up, input_precision=PRECISION)
    if DEFERRED:
        inverse_rms = inverse_rms_of(sums, row_size, deferred_eps)
        if WEIGHT_FIRST:
            gate, up = gate * inverse_rms[None, :], up * inverse_rms[None, :]
        else:
            gate, up = gate * inverse_rms[:, None], up * inverse_rms[:, None]
    value = silu_times(gate.to(out.dtype.element_ty), up.to(out.dtype.element_ty))
    if WEIGHT_FIRST or BLOCK_M == 1:
        tl.store(out + m[None, :] * half + n[:, None], value, mask=(m < rows)[None, :] & (n < half)[:, None])
    else:
        tl.store(out + m[:, None] * half + n[None, :], value, mask=(m < rows)[:, None] & (n < half)[None, :])
