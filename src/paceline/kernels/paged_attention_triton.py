"""The GPU form of paged attention: one program per request, kv head and split of the context, then a kernel that joins
the splits by their log-sum-exp.

Splitting the context keeps the whole device busy when few requests run, which is where a rollout spends its tail.
Imported only where a GPU runs: machines without one need no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device import num_sms, use_pdl
from paceline.kernels.hopper.matmul import TILES_FILE
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor
from paceline.kernels.hopper.tile_files import read_tile_file

_LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class AttentionTile:
    """How attention is divided into programs: what benchmarks/tune_products.py and tune_steps.py sweep."""

    block_n: int = 64
    """Positions of the context that a program scores at once."""
    max_block_m: int = 64
    """Most queries of a program; more are divided over programs, each of which reads the context."""
    warps: int = 4
    stages: int = 2
    waves: int = 2
    """Programs per SM that the context is split for; with more, the few programs of the last wave would run alone."""
    max_splits: int = 32


def read_attention_tiles(file: Path) -> dict[str, AttentionTile]:
    return {name: AttentionTile(**tile) for name, tile in read_tile_file(file)["attention"].items()}


ATTENTION_TILES = read_attention_tiles(TILES_FILE)
"""By the names of `attention_tile_name`; measured on an H200."""
MAX_QUERIES = 64  # per kv head, from which on all numbers of queries have the same tile
CACHE_PAGE, CACHE_CONTEXT = 32, 1024  # least page size and context capacity of a KV cache; a drafter's window has less


def attention_tile_name(queries: int, readers: int, capacity: int, page_size: int, sms: int) -> str:
    """The key of `ATTENTION_TILES` for `queries` per kv head and request, `readers` = requests * kv heads, a context of
    up to `capacity` positions, and a device with `sms` SMs: `queries` rounded up to a power of two, but for two cases.
    "large_batch" has few queries of so many requests that the context need not be split: with small blocks more
    programs fit on an SM. "small_batch" has many queries of one or two requests, whose context is split finely: small
    blocks divide it more evenly."""
    wide = min(MAX_QUERIES, max(16, triton.next_power_of_2(queries)))
    if wide == 16 and readers >= 2 * sms and page_size >= CACHE_PAGE:
        return "large_batch"
    if MAX_QUERIES // 2 < queries <= MAX_QUERIES and 16 * readers <= sms and capacity >= CACHE_CONTEXT:
        return "small_batch"
    return str(wide)


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    context: Tensor,
    tree: Tensor,
    span: int | None = None,
    tile: AttentionTile | None = None,
) -> Tensor:
    """q [B, T, heads, d] with each token's heads contiguous, pools [pages, kv_heads, page_size, d],
    table int32 [B, max_pages], context int32 [B], tree int64 [B, T] -> [B, T, heads, d].
    The visibility bits of `tree` cover `span` positions after the context, by default the T new tokens."""
    batch, new, heads, d = q.shape
    _, kv_heads, page_size, _ = k_pool.shape
    group = heads // kv_heads
    rows = new * group
    capacity = table.shape[1] * page_size
    if tile is None:
        name = attention_tile_name(rows, batch * kv_heads, capacity, page_size, num_sms(q.device))
        tile = ATTENTION_TILES[name]
    block_m = min(tile.max_block_m, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, block_m)
    max_blocks = triton.cdiv(capacity, tile.block_n)
    wanted = tile.waves * num_sms(q.device) // (batch * kv_heads * tiles)
    splits = max(1, min(tile.max_splits, max_blocks, wanted))
    out = torch.empty(batch, new, heads, d, dtype=q.dtype, device=q.device)
    # A single split needs no join, so it writes the output itself.
    part = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device) if splits > 1 else out
    lse = torch.empty(splits, batch, new, heads, dtype=torch.float32, device=q.device)
    pdl = use_pdl(q.device)
    _attend[(batch * tiles, kv_heads, splits)](
        q, k_pool, v_pool, table, context, tree, part, lse,
        q.stride(0), q.stride(1), table.stride(0), context.stride(0), tree.stride(0), tree.stride(1),
        d**-0.5, tiles, batch, new, span or new, table.shape[1], splits,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=group, D=d, BLOCK_D=triton.next_power_of_2(d), PAGE=page_size,
        BLOCK_M=block_m, BLOCK_N=tile.block_n, PDL=pdl,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=max(tile.warps, block_m // 16), num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        block_s, block_d = max(8, triton.next_power_of_2(splits)), triton.next_power_of_2(d)
        _join[(batch * new * heads,)](
            part, lse, out, batch * new * heads, splits, D=d, BLOCK_D=block_d, BLOCK_S=block_s, PDL=pdl,
            num_warps=max(1, block_s * block_d // 2048), launch_pdl=pdl,
        )  # fmt: skip
    return out


# Strides and counts that gain nothing by being constants are not specialized: each variant takes a second to compile.
@triton.jit(
    do_not_specialize=["table_stride", "context_stride", "tree_stride_b", "tree_stride_t",
                       "tiles", "batch", "new", "span", "max_pages", "splits"],
    do_not_specialize_on_alignment=["table", "context", "tree"],
)  # fmt: skip
def _attend(
    q, k_pool, v_pool, table, context, tree, part, lse,
    q_stride_b, q_stride_t, table_stride, context_stride, tree_stride_b, tree_stride_t,
    scale, tiles, batch, new, span, max_pages, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    kv = tl.program_id(1)
    split = tl.program_id(2)
    pages = table + b * table_stride
    dim = tl.arange(0, BLOCK_D)
    wait_for_predecessor(PDL)
    cached = tl.load(context + b * context_stride)
    total = tl.minimum(cached + span, max_pages * PAGE)  # new tokens beyond the table's capacity are seen by none
    blocks = tl.cdiv(total, BLOCK_N)
    per_split = tl.cdiv(blocks, splits)
    first = split * per_split * BLOCK_N
    last = tl.minimum(total, first + per_split * BLOCK_N)
    # Blocks before this position hold nothing but context, which all queries see: they need no mask.
    unmasked = tl.maximum(first, tl.minimum(last, cached // BLOCK_N * BLOCK_N))

    # Rows are the queries of this kv head, token by token: row = token * GROUP + head within the group.
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    alive = token < new
    head = kv * GROUP + row % GROUP
    in_d = dim < D
    q_offset = b * q_stride_b + token * q_stride_t + head * D
    queries = tl.load(q + q_offset[:, None] + dim[None, :], mask=alive[:, None] & in_d[None, :], other=0.0)
    sees = tl.load(tree + b * tree_stride_b + token * tree_stride_t, mask=alive, other=0)

    best = tl.full([BLOCK_M], -1e30, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale = scale * _LOG2E  # so that the exponential is a power of two
    for start in range(first, unmasked, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        offset = _pool_offsets(pages, start, n, n < last, kv, KV_HEADS, PAGE, BLOCK_N, D, False)
        keys = _load_rows(k_pool, offset, dim, n < last, D, BLOCK_D, False)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        higher = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - higher)
        p = tl.exp2(scores - higher[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        values = _load_rows(v_pool, offset, dim, n < last, D, BLOCK_D, False)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
        best = higher
    for start in range(unmasked, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_range = n < last
        offset = _pool_offsets(pages, start, n, in_range, kv, KV_HEADS, PAGE, BLOCK_N, D, True)
        keys = _load_rows(k_pool, offset, dim, in_range, D, BLOCK_D, True)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        relative = n - cached  # negative within the context, else the index of a new token
        bit = (sees[:, None] >> tl.minimum(tl.maximum(relative, 0), 63)[None, :].to(tl.int64)) & 1
        visible = in_range[None, :] & ((relative < 0)[None, :] | (bit == 1))
        scores = tl.where(visible, scores, -1e30)
        higher = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - higher)
        p = tl.where(visible, tl.exp2(scores - higher[:, None]), 0.0)
        weight = weight * shrink + tl.sum(p, 1)
        values = _load_rows(v_pool, offset, dim, in_range, D, BLOCK_D, True)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
        best = higher

    # A split of which a query sees nothing has weight 0: its log-sum-exp is so low that the join ignores it.
    safe = tl.maximum(weight, 1e-30)
    to = split * batch * new * HEADS + (b * new + token) * HEADS + head
    tl.store(lse + to, tl.where(weight > 0, best + tl.log2(safe), -1e30), mask=alive)
    value = (acc / safe[:, None]).to(part.dtype.element_ty)
    tl.store(part + to[:, None].to(tl.int64) * D + dim[None, :], value, mask=alive[:, None] & in_d[None, :])


@triton.jit
def _pool_offsets(
    pages, start, n, in_range, kv,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Offsets of the positions n of a request in a layer's pool; a block within one page reads its table entry once."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(pages + start // PAGE).to(tl.int64)
        offset = ((page * KV_HEADS + kv) * PAGE + start % PAGE) * D + tl.arange(0, BLOCK_N) * D
    else:
        if MASK:
            page = tl.load(pages + n // PAGE, mask=in_range, other=0).to(tl.int64)
        else:
            page = tl.load(pages + n // PAGE).to(tl.int64)
        offset = ((page * KV_HEADS + kv) * PAGE + n % PAGE) * D
    return offset


@triton.jit
def _load_rows(pool, offset, dim, in_range, D: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr):
    """Keys or values [BLOCK_N, BLOCK_D] at these offsets."""
    at = pool + offset[:, None] + dim[None, :]
    if MASK:
        return tl.load(at, mask=in_range[:, None] & (dim < D)[None, :], other=0.0)
    if BLOCK_D != D:
        return tl.load(at, mask=(dim < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit(do_not_specialize=["rows", "splits"])
def _join(
    part, lse, out, rows, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    wait_for_predecessor(PDL)
    mask = (s < splits)[:, None] & (dim < D)[None, :]
    p = tl.load(part + (s[:, None] * rows + row) * D + dim[None, :], mask=mask, other=0.0)
    sums = tl.load(lse + s * rows + row, mask=s < splits, other=-float("inf"))
    w = tl.exp2(sums - tl.max(sums, 0))
    w = w / tl.sum(w, 0)
    tl.store(out + row * D + dim, tl.sum(p * w[:, None], 0).to(out.dtype.element_ty), mask=dim < D)
