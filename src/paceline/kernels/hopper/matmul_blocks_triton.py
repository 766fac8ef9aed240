"""Building blocks of the matmul kernels: prefetching and loading weights and rows, the loop over the inner dimension.

`row` and `weight_row` are offsets of rows of x and of the weight; `alive` and `mask` say which rows and columns exist.
EVEN: the inner dimension is a multiple of the block, so columns need no mask.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _prefetch_l2(pointers):
    """Start to read memory into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def repeat_rows(m, rows):
    """Indices of rows of x for a block of more than `rows`: padding reads the rows from the first on again. Were it all
    the last row, every program would read that one cache line over and over, and a matmul of 72 rows would take twice
    as long as one of 128."""
    return m % rows


@triton.jit
def prefetch(weight, weight_row, first, last, LINES: tl.constexpr):
    """Prefetch the first LINES cache lines of the columns [first, last) of every row of the tile, none beyond."""
    line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # numbers in a cache line of 128 bytes
    at = tl.minimum(first + tl.arange(0, LINES) * line, tl.maximum(last, 1) - 1)
    _prefetch_l2(weight + weight_row[:, None] + at[None, :])


@triton.jit
def load_weights(pointers, mask, EVEN: tl.constexpr):
    """A block of weights; they are read once, so the cache need not keep them."""
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_rows(pointers, mask, EVEN: tl.constexpr):
    """A block of x."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_padded_rows(pointers, alive, mask, EVEN: tl.constexpr):
    """A block of x whose padding is zero and not read: every program reads all of x, which adds up."""
    if EVEN:
        return tl.load(pointers, mask=alive, other=0.0)
    return tl.load(pointers, mask=alive & mask, other=0.0)


@triton.jit
def multiply_row(
    lanes, x, weight, weight_row, first, last, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UNROLL: tl.constexpr
):  # fmt: skip
    """A single row x times rows of the weight over the columns [first, last), added to `lanes` [BLOCK_N, BLOCK_K]; the
    sum over BLOCK_K is the caller's."""
    for start in tl.range(first, last, BLOCK_K, loop_unroll_factor=UNROLL):
        k = start + tl.arange(0, BLOCK_K)
        w = load_weights(weight + weight_row[:, None] + k[None, :], (k < last)[None, :], EVEN)
        lanes += w.to(tl.float32) * load_rows(x + k, k < last, EVEN).to(tl.float32)[None, :]
    return lanes


@triton.jit
def multiply_rows(
    acc, x, weight, row, alive, weight_row, first, last,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of x times rows of the weight over the columns [first, last), added to `acc`: [BLOCK_N, BLOCK_M] if
    WEIGHT_FIRST, else [BLOCK_M, BLOCK_N]."""
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if WEIGHT_FIRST:
            w = load_weights(weight + weight_row[:, None] + k[None, :], (k < last)[None, :], EVEN)
            a = load_rows(x + row[None, :] + k[:, None], (k < last)[:, None], EVEN)
            acc = tl.dot(w, a, acc, input_precision=PRECISION)
        else:
            w = load_weights(weight + weight_row[None, :] + k[:, None], (k < last)[:, None], EVEN)
            a = load_padded_rows(x + row[:, None] + k[None, :], alive[:, None], (k < last)[None, :], EVEN)
            acc = tl.dot(a, w, acc, input_precision=PRECISION)
    return acc
