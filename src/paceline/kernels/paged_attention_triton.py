"""The GPU form of paged attention: one program per request, kv head and stretch of context, then a join.

Splitting the context keeps the whole card busy when few requests run, which is where a rollout spends its tail.
Imported only where a GPU runs: machines without one need no Triton.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device import processors, starts_early
from paceline.kernels.hopper.matmul import SHIPPED
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor

_LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Cut:
    """How the work is cut up: what benchmarks/tune_products.py and tune_steps.py sweep."""

    block_n: int = 64
    """Places that are looked at together."""
    most_m: int = 64
    """Most queries that a program takes on; more are shared out, and each part reads the context."""
    warps: int = 4
    stages: int = 2
    waves: int = 2
    """Programs per processor that the context is split for; not more, since a few that come last would take a turn of
    their own."""
    most_splits: int = 32


def read_cuts(file: Path) -> dict[str, Cut]:
    return {name: Cut(**cut) for name, cut in json.loads(file.read_text())["cuts"].items()}


CUTS = read_cuts(SHIPPED)
"""As `cut_name` names them; measured on an H200."""
WIDEST = 64  # queries that cuts are told apart by
PAGE, LONG = 32, 1024  # places of a page and of a context, from which on both are a cache's and not a drafter's window


def cut_name(queries: int, readers: int, places: int, page_size: int, most: int) -> str:
    """For so many queries of each of so many readers of a context of up to so many places, on `most` processors: the
    power of two that they fit in, but for two cases. Few queries of so many requests that the context need not be split
    are `crowded`: with small blocks more programs fit on a processor. Many queries of a request or two, whose context
    is split finely, are `lone`: small blocks share it out more evenly."""
    wide = min(WIDEST, max(16, triton.next_power_of_2(queries)))
    if wide == 16 and readers >= 2 * most and page_size >= PAGE:
        return "crowded"
    if WIDEST // 2 < queries <= WIDEST and 16 * readers <= most and places >= LONG:
        return "lone"
    return str(wide)


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    context: Tensor,
    tree: Tensor,
    span: int | None = None,
    cut: Cut | None = None,
) -> Tensor:
    """q [B, T, heads, d] with each token's heads side by side, pools [pages, kv_heads, page_size, d],
    table int32 [B, most], context int32 [B], tree int64 [B, T] -> [B, T, heads, d].
    `span` places behind the context can be seen, by default those of the T tokens."""
    batch, new, heads, d = q.shape
    _, kv_heads, page_size, _ = k_pool.shape
    group = heads // kv_heads
    rows = new * group
    places = table.shape[1] * page_size
    cut = cut or CUTS[cut_name(rows, batch * kv_heads, places, page_size, processors(q.device))]
    block_m = min(cut.most_m, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, block_m)
    most_blocks = triton.cdiv(places, cut.block_n)
    wanted = cut.waves * processors(q.device) // (batch * kv_heads * tiles)
    splits = max(1, min(cut.most_splits, most_blocks, wanted))
    out = torch.empty(batch, new, heads, d, dtype=q.dtype, device=q.device)
    # A stretch that is all there is needs no join, so its result is the result.
    part = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device) if splits > 1 else out
    lse = torch.empty(splits, batch, new, heads, dtype=torch.float32, device=q.device)
    early = starts_early(q.device)
    _attend[(batch * tiles, kv_heads, splits)](
        q, k_pool, v_pool, table, context, tree, part, lse,
        q.stride(0), q.stride(1), table.stride(0), context.stride(0), tree.stride(0), tree.stride(1),
        d**-0.5, tiles, batch, new, span or new, table.shape[1], splits,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=group, D=d, BLOCK_D=triton.next_power_of_2(d), PAGE=page_size,
        BLOCK_M=block_m, BLOCK_N=cut.block_n, PDL=early,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=max(cut.warps, block_m // 16), num_stages=cut.stages, launch_pdl=early,
    )  # fmt: skip
    if splits > 1:
        block_s, block_d = max(8, triton.next_power_of_2(splits)), triton.next_power_of_2(d)
        _join[(batch * new * heads,)](
            part, lse, out, batch * new * heads, splits, D=d, BLOCK_D=block_d, BLOCK_S=block_s, PDL=early,
            num_warps=max(1, block_s * block_d // 2048), launch_pdl=early,
        )  # fmt: skip
    return out


# Compiled once for all strides and counts that nothing is gained by knowing: it takes a second each time.
@triton.jit(
    do_not_specialize=["table_stride", "context_stride", "tree_stride_b", "tree_stride_t",
                       "tiles", "batch", "new", "span", "most", "splits"],
    do_not_specialize_on_alignment=["table", "context", "tree"],
)  # fmt: skip
def _attend(
    q, k_pool, v_pool, table, context, tree, part, lse,
    q_stride_b, q_stride_t, table_stride, context_stride, tree_stride_b, tree_stride_t,
    scale, tiles, batch, new, span, most, splits,
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
    total = tl.minimum(cached + span, most * PAGE)  # new tokens that the table has no room for are seen by nobody
    blocks = tl.cdiv(total, BLOCK_N)
    per_split = tl.cdiv(blocks, splits)
    first = split * per_split * BLOCK_N
    last = tl.minimum(total, first + per_split * BLOCK_N)
    # Up to here blocks hold nothing but context, which everybody sees.
    known = tl.maximum(first, tl.minimum(last, cached // BLOCK_N * BLOCK_N))

    # Rows are the queries of this kv head, token by token: row = token * GROUP + head within the group.
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    alive = token < new
    head = kv * GROUP + row % GROUP
    in_d = dim < D
    place = b * q_stride_b + token * q_stride_t + head * D
    queries = tl.load(q + place[:, None] + dim[None, :], mask=alive[:, None] & in_d[None, :], other=0.0)
    sees = tl.load(tree + b * tree_stride_b + token * tree_stride_t, mask=alive, other=0)

    best = tl.full([BLOCK_M], -1e30, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale = scale * _LOG2E  # so that the exponential is a power of two
    for start in range(first, known, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        spot = _spots(pages, start, n, n < last, kv, KV_HEADS, PAGE, BLOCK_N, D, False)
        keys = _rows(k_pool, spot, dim, n < last, D, BLOCK_D, False)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        higher = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - higher)
        p = tl.exp2(scores - higher[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        values = _rows(v_pool, spot, dim, n < last, D, BLOCK_D, False)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
        best = higher
    for start in range(known, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        there = n < last
        spot = _spots(pages, start, n, there, kv, KV_HEADS, PAGE, BLOCK_N, D, True)
        keys = _rows(k_pool, spot, dim, there, D, BLOCK_D, True)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        age = n - cached  # below 0: context
        bit = (sees[:, None] >> tl.minimum(tl.maximum(age, 0), 63)[None, :].to(tl.int64)) & 1
        visible = there[None, :] & ((age < 0)[None, :] | (bit == 1))
        scores = tl.where(visible, scores, -1e30)
        higher = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - higher)
        p = tl.where(visible, tl.exp2(scores - higher[:, None]), 0.0)
        weight = weight * shrink + tl.sum(p, 1)
        values = _rows(v_pool, spot, dim, there, D, BLOCK_D, True)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
        best = higher

    # A stretch of which a row sees nothing has weight 0: its log-sum-exp is so low that the join ignores it.
    safe = tl.maximum(weight, 1e-30)
    to = split * batch * new * HEADS + (b * new + token) * HEADS + head
    tl.store(lse + to, tl.where(weight > 0, best + tl.log2(safe), -1e30), mask=alive)
    value = (acc / safe[:, None]).to(part.dtype.element_ty)
    tl.store(part + to[:, None].to(tl.int64) * D + dim[None, :], value, mask=alive[:, None] & in_d[None, :])


@triton.jit
def _spots(
    pages, start, n, there, kv,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Where the places n of a request lie in a layer's pool; a block within one page asks for that page once."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(pages + start // PAGE).to(tl.int64)
        spot = ((page * KV_HEADS + kv) * PAGE + start % PAGE) * D + tl.arange(0, BLOCK_N) * D
    else:
        if MASK:
            page = tl.load(pages + n // PAGE, mask=there, other=0).to(tl.int64)
        else:
            page = tl.load(pages + n // PAGE).to(tl.int64)
        spot = ((page * KV_HEADS + kv) * PAGE + n % PAGE) * D
    return spot


@triton.jit
def _rows(pool, spot, dim, there, D: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr):
    at = pool + spot[:, None] + dim[None, :]
    if MASK:
        return tl.load(at, mask=there[:, None] & (dim < D)[None, :], other=0.0)
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
