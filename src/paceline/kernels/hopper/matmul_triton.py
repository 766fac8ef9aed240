"""Products of a few rows with a large matrix, at the speed at which the matrix can be read.

A matrix product of 1 to 64 rows is a read of its weights. Its inner dimension is split, so that small matrices keep all
processors busy too; the partial sums are float32 and whoever comes next adds them up, in order, together with what it
has to do anyway (`epilogue_triton`). Nothing is added by atomics, so the same input gives the same output.

Launched early (`device.pdl`), a kernel asks for its weights, or the first of them, which depend on nothing, and then
waits: they are on their way to the cache while the kernels before it take their time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels import device
from paceline.kernels.hopper.epilogue import DeferredNorm
from paceline.kernels.hopper.epilogue_triton import root_of, scale_args, silu_times, squares_of
from paceline.kernels.hopper.matmul import Tile
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor

LINE = 128  # bytes that memory is asked for at once


def split_k_matmul(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """x [rows, in], weight [out, in] -> partial sums float32 [splits, rows, out]"""
    rows, size = x.shape
    out = weight.shape[0]
    part = torch.empty(tile.splits, rows, out, dtype=torch.float32, device=x.device)
    _split[(triton.cdiv(out, tile.block_n), tile.splits)](
        x, weight, part, x.stride(0), weight.stride(0), rows, out, size,
        tile.splits, BLOCK_M=block_rows(rows, tile), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        EVEN=size % tile.block_k == 0, WEIGHT_FIRST=tile.weight_first,
        PRECISION=_precision(x), AHEAD=tile.ahead, UNROLL=tile.unroll, **_launch(weight, tile),
    )  # fmt: skip
    return part


def residual_matmul(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None, norm: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """residual + x weight^T (+ bias) [rows, out], the same times `norm` [out], and sums of squares of parts of its
    rows, float32 [parts, rows]."""
    rows, size = x.shape
    out = weight.shape[0]
    total, scaled = (torch.empty(rows, out, dtype=x.dtype, device=x.device) for _ in range(2))
    programs = triton.cdiv(out, tile.block_n)
    squares = torch.empty(programs, rows, dtype=torch.float32, device=x.device)
    _added[(programs,)](
        x, weight, residual, bias, norm, total, scaled, squares,
        x.stride(0), weight.stride(0), residual.stride(0), rows, out, size,
        BLOCK_M=block_rows(rows, tile), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN=size % tile.block_k == 0,
        WEIGHT_FIRST=tile.weight_first, PRECISION=_precision(x), BIAS=bias is not None, **_launch(weight, tile),
    )  # fmt: skip
    return total, scaled, squares


def gated_matmul(x: Tensor, weight: Tensor, tile: Tile, scale: DeferredNorm | None = None) -> Tensor:
    """x [rows, in], weight [2 * size, in], gate above up -> silu(x gate^T) * (x up^T), [rows, size]"""
    rows, size = x.shape
    half = weight.shape[0] // 2
    out = torch.empty(rows, half, dtype=x.dtype, device=x.device)
    _gated[(triton.cdiv(half, tile.block_n),)](
        x, weight, out, x.stride(0), weight.stride(0), rows, half, size,
        BLOCK_M=block_rows(rows, tile), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        EVEN=size % tile.block_k == 0, WEIGHT_FIRST=tile.weight_first, PRECISION=_precision(x),
        UNROLL=tile.unroll, **scale_args(scale), **_launch(weight, tile),
    )  # fmt: skip
    return out


def block_rows(rows: int, tile: Tile) -> int:
    """Matrix units take 16 rows at least, or 8 as the second operand; a single row without them is a plain sum."""
    return 1 if tile.vector else max(8 if tile.weight_first else 16, triton.next_power_of_2(rows))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _launch(weight: Tensor, tile: Tile) -> dict[str, int | bool]:
    early = device.starts_early(weight.device)
    lines = lines_ahead(weight, tile) if early and not tile.ahead else 1
    return {"num_warps": tile.warps, "num_stages": tile.stages, "LINES": lines, "PDL": early, "launch_pdl": early}


def lines_ahead(weight: Tensor, tile: Tile) -> int:
    """Of each row's stretch of a program, how many lines it asks for before its turn: a power of two."""
    rows, size = weight.shape
    blocks = triton.cdiv(triton.cdiv(size, tile.block_k), tile.splits)
    all_of_it = triton.next_power_of_2(triton.cdiv(blocks * tile.block_k * weight.element_size(), LINE))
    most = device.ahead_bytes // (rows * tile.splits * LINE)
    return min(all_of_it, 1 << max(0, most.bit_length() - 1))


@triton.jit
def ahead_of_time(pointers):
    """Ask for memory that will be read soon."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows", "splits"])
def _split(
    x, weight, part, x_stride, weight_stride, rows, out, size, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
    UNROLL: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    blocks = tl.cdiv(size, BLOCK_K)
    per_split = tl.cdiv(blocks, splits)
    first = split * per_split * BLOCK_K
    last = tl.minimum(size, first + per_split * BLOCK_K)
    wide = tl.minimum(n, out - 1).to(tl.int64) * weight_stride  # columns behind the last are read again, not kept
    if AHEAD:
        k = first + tl.arange(0, BLOCK_K)
        at = weight + wide[:, None] + k[None, :]
        taken = tl.load(at, mask=(k < last)[None, :], other=0.0, eviction_policy="evict_first")
    elif PDL:
        _prefetch(weight, wide, first, last, LINES)
    wait_for_predecessor(PDL)
    m = tl.arange(0, BLOCK_M)
    row = _repeated(m, rows) * x_stride
    begin = first
    if BLOCK_M == 1:
        lanes = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        if AHEAD:
            lanes = taken.to(tl.float32) * tl.load(x + k, mask=k < last, other=0.0).to(tl.float32)[None, :]
            begin += BLOCK_K
        acc = tl.sum(_lanes(lanes, x, weight, wide, begin, last, BLOCK_K, EVEN, UNROLL), 1)[:, None]
    else:
        if WEIGHT_FIRST:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if AHEAD:
            a = tl.load(x + row[None, :] + k[:, None], mask=(k < last)[:, None], other=0.0)
            acc = tl.dot(taken, a, acc, input_precision=PRECISION)
            begin += BLOCK_K
        acc = _sum(acc, x, weight, row, m < rows, wide, begin, last, BLOCK_K, EVEN, WEIGHT_FIRST, PRECISION)
    part += split.to(tl.int64) * rows * out
    if WEIGHT_FIRST or BLOCK_M == 1:
        to = part + m[None, :] * out + n[:, None]
        tl.store(to, acc, mask=(m < rows)[None, :] & (n < out)[:, None])
    else:
        to = part + m[:, None] * out + n[None, :]
        tl.store(to, acc, mask=(m < rows)[:, None] & (n < out)[None, :])


@triton.jit
def _repeated(m, rows):
    """Rows that fill a block up are others again: were they all the last one, every program would read that one line
    over and over, and the product of 72 rows would take twice as long as that of 128."""
    return m % rows


@triton.jit
def _prefetch(weight, wide, first, last, LINES: tl.constexpr):
    """The first lines of the columns [first, last) of every row of the tile; what lies behind is not asked for."""
    line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # numbers of a line
    at = tl.minimum(first + tl.arange(0, LINES) * line, tl.maximum(last, 1) - 1)
    ahead_of_time(weight + wide[:, None] + at[None, :])


@triton.jit
def _weights(pointers, there, EVEN: tl.constexpr):
    """They are read once, so the cache need not keep them."""
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=there, other=0.0)


@triton.jit
def _rows(pointers, there, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=there, other=0.0)


@triton.jit
def _padded(pointers, alive, there, EVEN: tl.constexpr):
    """Rows that only fill a block up are not read: every program reads all of x, which adds up."""
    if EVEN:
        return tl.load(pointers, mask=alive, other=0.0)
    return tl.load(pointers, mask=alive & there, other=0.0)


@triton.jit
def _lanes(lanes, x, weight, wide, first, last, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UNROLL: tl.constexpr):
    """A single row times the rows of the weight that begin at `wide`, over the columns [first, last), not added up."""
    for start in tl.range(first, last, BLOCK_K, loop_unroll_factor=UNROLL):
        k = start + tl.arange(0, BLOCK_K)
        w = _weights(weight + wide[:, None] + k[None, :], (k < last)[None, :], EVEN)
        lanes += w.to(tl.float32) * _rows(x + k, k < last, EVEN).to(tl.float32)[None, :]
    return lanes


@triton.jit
def _sum(
    acc, x, weight, row, alive, wide, first, last,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The rows of x times those of the weight that begin at `wide`, over the columns [first, last), added to `acc`."""
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if WEIGHT_FIRST:
            w = _weights(weight + wide[:, None] + k[None, :], (k < last)[None, :], EVEN)
            a = _rows(x + row[None, :] + k[:, None], (k < last)[:, None], EVEN)
            acc = tl.dot(w, a, acc, input_precision=PRECISION)
        else:
            w = _weights(weight + wide[None, :] + k[:, None], (k < last)[:, None], EVEN)
            a = _padded(x + row[:, None] + k[None, :], alive[:, None], (k < last)[None, :], EVEN)
            acc = tl.dot(a, w, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["rows"])
def _added(
    x, weight, residual, bias, norm, total, scaled, squares, x_stride, weight_stride, residual_stride, rows, out, size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr, BIAS: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = tl.minimum(n, out - 1).to(tl.int64) * weight_stride
    if PDL:
        _prefetch(weight, wide, 0, size, LINES)
    share = tl.load(norm + n, mask=n < out, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    m = tl.arange(0, BLOCK_M)
    there = (m < rows)[:, None] & (n < out)[None, :]
    before = tl.load(residual + m[:, None] * residual_stride + n[None, :], mask=there, other=0.0).to(tl.float32)
    row = _repeated(m, rows) * x_stride
    if WEIGHT_FIRST:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = _sum(acc, x, weight, row, m < rows, wide, 0, size, BLOCK_K, EVEN, WEIGHT_FIRST, PRECISION)
    if WEIGHT_FIRST:
        acc = tl.trans(acc)
    acc += before
    if BIAS:
        acc += tl.load(bias + n, mask=n < out, other=0.0).to(tl.float32)[None, :]
    kind = total.dtype.element_ty
    value = tl.where(there, acc.to(kind), 0.0).to(kind)
    to = m[:, None] * out + n[None, :]
    tl.store(total + to, value, mask=there)
    value = value.to(tl.float32)
    tl.store(scaled + to, (value * share[None, :]).to(kind), mask=there)
    tl.store(squares + tl.program_id(0) * rows + m, tl.sum(value * value, 1), mask=m < rows)


@triton.jit(do_not_specialize=["rows", "square_parts", "row_size"])
def _gated(
    x, weight, out, x_stride, weight_stride, rows, half, size, squares, square_parts, row_size, scale_eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr,
    UNROLL: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program makes the gates of its columns and what they gate in one loop, so both streams are read at once."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = tl.minimum(n, half - 1).to(tl.int64) * weight_stride
    below = weight + half.to(tl.int64) * weight_stride
    if PDL:
        _prefetch(weight, wide, 0, size, LINES)
        _prefetch(below, wide, 0, size, LINES)
    wait_for_predecessor(PDL)
    m = tl.arange(0, BLOCK_M)
    row = _repeated(m, rows) * x_stride
    if SCALE:
        sums = squares_of(squares, square_parts, rows, tl.minimum(m, rows - 1), SCALE)
    if BLOCK_M == 1:
        gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, size, BLOCK_K, loop_unroll_factor=UNROLL):
            k = start + tl.arange(0, BLOCK_K)
            at, there = wide[:, None] + k[None, :], (k < size)[None, :]
            g, u = _weights(weight + at, there, EVEN), _weights(below + at, there, EVEN)
            a = _rows(x + k, k < size, EVEN).to(tl.float32)[None, :]
            gates += g.to(tl.float32) * a
            ups += u.to(tl.float32) * a
        gate, up = tl.sum(gates, 1)[:, None], tl.sum(ups, 1)[:, None]
    elif WEIGHT_FIRST:
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, size, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            at, there = wide[:, None] + k[None, :], (k < size)[None, :]
            g, u = _weights(weight + at, there, EVEN), _weights(below + at, there, EVEN)
            a = _rows(x + row[None, :] + k[:, None], (k < size)[:, None], EVEN)
            gate = tl.dot(g, a, gate, input_precision=PRECISION)
            up = tl.dot(u, a, up, input_precision=PRECISION)
    else:
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, size, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            at, there = wide[None, :] + k[:, None], (k < size)[:, None]
            g, u = _weights(weight + at, there, EVEN), _weights(below + at, there, EVEN)
            a = _padded(x + row[:, None] + k[None, :], (m < rows)[:, None], (k < size)[None, :], EVEN)
            gate = tl.dot(a, g, gate, input_precision=PRECISION)
            up = tl.dot(a, u, up, input_precision=PRECISION)
    if SCALE:
        root = root_of(sums, row_size, scale_eps)
        if WEIGHT_FIRST:
            gate, up = gate * root[None, :], up * root[None, :]
        else:
            gate, up = gate * root[:, None], up * root[:, None]
    value = silu_times(gate.to(out.dtype.element_ty), up.to(out.dtype.element_ty))
    if WEIGHT_FIRST or BLOCK_M == 1:
        tl.store(out + m[None, :] * half + n[:, None], value, mask=(m < rows)[None, :] & (n < half)[:, None])
    else:
        tl.store(out + m[:, None] * half + n[None, :], value, mask=(m < rows)[:, None] & (n < half)[None, :])
