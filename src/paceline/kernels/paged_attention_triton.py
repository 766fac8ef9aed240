"""The GPU form of paged attention: one program per request, kv head and stretch of context, then a join.

Splitting the context keeps the whole card busy when few requests run, which is where a rollout spends its tail.
Imported only where a GPU runs: machines without one need no Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device import processors

BLOCK_N = 64
MAX_SPLITS = 32


def paged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, context: Tensor, tree: Tensor, span: int | None = None
) -> Tensor:
    """q [B, T, heads, d] with each token's heads side by side, pools [pages, kv_heads, page_size, d],
    table int32 [B, most], context int32 [B], tree int64 [B, T] -> [B, T, heads, d].
    `span` places behind the context can be seen, by default those of the T tokens."""
    batch, new, heads, d = q.shape
    _, kv_heads, page_size, _ = k_pool.shape
    group = heads // kv_heads
    rows = new * group
    block_m = max(16, min(64, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, block_m)
    most_blocks = triton.cdiv(table.shape[1] * page_size, BLOCK_N)
    splits = max(1, min(MAX_SPLITS, most_blocks, 2 * processors(q.device) // (batch * kv_heads * tiles)))
    out = torch.empty(batch, new, heads, d, dtype=q.dtype, device=q.device)
    # A stretch that is all there is needs no join, so its result is the result.
    part = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device) if splits > 1 else out
    lse = torch.empty(splits, batch, new, heads, dtype=torch.float32, device=q.device)
    _attend[(batch * tiles, kv_heads, splits)](
        q, k_pool, v_pool, table, context, tree, part, lse,
        q.stride(0), q.stride(1), table.stride(0), context.stride(0), tree.stride(0), tree.stride(1),
        d**-0.5, tiles, batch, new, span or new, table.shape[1],
        HEADS=heads, KV_HEADS=kv_heads, GROUP=group, D=d, BLOCK_D=triton.next_power_of_2(d), PAGE=page_size,
        BLOCK_M=block_m, BLOCK_N=BLOCK_N, SPLITS=splits,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _join[(batch * new * heads,)](
            part, lse, out, batch * new * heads, D=d, BLOCK_D=triton.next_power_of_2(d), SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _attend(
    q, k_pool, v_pool, table, context, tree, part, lse,
    q_stride_b, q_stride_t, table_stride, context_stride, tree_stride_b, tree_stride_t,
    scale, tiles, batch, new, span, most,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    kv = tl.program_id(1)
    split = tl.program_id(2)
    cached = tl.load(context + b * context_stride)
    total = tl.minimum(cached + span, most * PAGE)  # new tokens that the table has no room for are seen by nobody

    # Rows are the queries of this kv head, token by token: row = token * GROUP + head within the group.
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    alive = token < new
    head = kv * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D)
    in_d = dim < D
    place = b * q_stride_b + token * q_stride_t + head * D
    queries = tl.load(q + place[:, None] + dim[None, :], mask=alive[:, None] & in_d[None, :], other=0.0)
    sees = tl.load(tree + b * tree_stride_b + token * tree_stride_t, mask=alive, other=0)

    blocks = tl.cdiv(total, BLOCK_N)
    per_split = tl.cdiv(blocks, SPLITS)
    first = split * per_split * BLOCK_N
    last = tl.minimum(total, first + per_split * BLOCK_N)

    best = tl.full([BLOCK_M], -1e30, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        there = n < last
        page = tl.load(table + b * table_stride + n // PAGE, mask=there, other=0).to(tl.int64)
        spot = ((page * KV_HEADS + kv) * PAGE + n % PAGE) * D
        full = there[:, None] & in_d[None, :]
        keys = tl.load(k_pool + spot[:, None] + dim[None, :], mask=full, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        age = n - cached  # below 0: context, which everybody sees
        bit = (sees[:, None] >> tl.minimum(tl.maximum(age, 0), 63)[None, :].to(tl.int64)) & 1
        visible = there[None, :] & ((age < 0)[None, :] | (bit == 1))
        scores = tl.where(visible, scores, -1e30)
        higher = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp(best - higher)
        p = tl.where(visible, tl.exp(scores - higher[:, None]), 0.0)
        weight = weight * shrink + tl.sum(p, 1)
        values = tl.load(v_pool + spot[:, None] + dim[None, :], mask=full, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
        best = higher

    # A stretch of which a row sees nothing has weight 0: its log-sum-exp is so low that the join ignores it.
    safe = tl.maximum(weight, 1e-30)
    to = split * batch * new * HEADS + (b * new + token) * HEADS + head
    tl.store(lse + to, tl.where(weight > 0, best + tl.log(safe), -1e30), mask=alive)
    value = (acc / safe[:, None]).to(part.dtype.element_ty)
    tl.store(part + to[:, None] * D + dim[None, :], value, mask=alive[:, None] & in_d[None, :])


@triton.jit
def _join(part, lse, out, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    row = tl.program_id(0)
    s = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    sums = tl.load(lse + s * rows + row, mask=s < SPLITS, other=-float("inf"))
    w = tl.exp(sums - tl.max(sums, 0))
    w = w / tl.sum(w, 0)
    mask = (s < SPLITS)[:, None] & (dim < D)[None, :]
    p = tl.load(part + (s[:, None] * rows + row) * D + dim[None, :], mask=mask, other=0.0)
    tl.store(out + row * D + dim, tl.sum(p * w[:, None], 0).to(out.dtype.element_ty), mask=dim < D)
