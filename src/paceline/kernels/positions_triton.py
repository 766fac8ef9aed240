"""The GPU form of `kernels.positions`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device import use_pdl
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor

MAX_NEW_TOKENS = 64  # tokens that a pass adds to a request: a tree's visibility is a 64-bit mask


def kv_slots(table: Tensor, context: Tensor, new: int, page_size: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """As `kernels.positions.kv_slots`."""
    batch, max_pages = table.shape
    out = torch.empty(batch * new * kv_heads, dtype=torch.int64, device=table.device)
    usable = torch.empty(batch, new, dtype=torch.bool, device=table.device)
    pdl = use_pdl(table.device)
    assert new <= MAX_NEW_TOKENS, "a tree's visibility is a mask of as many bits"
    _kv_slots[(batch,)](
        table, context, out, usable, table.stride(0), context.stride(0), new, max_pages,
        PAGE=page_size, KV_HEADS=kv_heads, BLOCK_T=MAX_NEW_TOKENS,
        BLOCK_H=triton.next_power_of_2(kv_heads), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return out, usable


@triton.jit(
    do_not_specialize=["table_stride", "context_stride", "new", "max_pages"],
    do_not_specialize_on_alignment=["table", "context"],
)
def _kv_slots(
    table, context, out, usable, table_stride, context_stride, new, max_pages,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK_T)
    head = tl.arange(0, BLOCK_H)[None, :]
    wait_for_predecessor(PDL)
    position = tl.load(context + b * context_stride) + t
    page = tl.load(table + b * table_stride + tl.minimum(position // PAGE, max_pages - 1), mask=t < new, other=0)
    page = tl.where(position < max_pages * PAGE, page, 0).to(tl.int64)
    row = (page[:, None] * KV_HEADS + head) * PAGE + (position % PAGE)[:, None]
    tl.store(out + (b * new + t[:, None]) * KV_HEADS + head, row, mask=(t < new)[:, None] & (head < KV_HEADS))
    tl.store(usable + b * new + t, page > 0, mask=t < new)


def tree_nodes(token: Tensor, context: Tensor, draft_tokens: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.positions.tree_nodes`."""
    batch, new = depth.shape
    assert new <= MAX_NEW_TOKENS, "a tree's visibility is a mask of as many bits"
    tokens, positions = (torch.empty(batch * new, dtype=torch.int32, device=token.device) for _ in range(2))
    pdl = use_pdl(token.device)
    _tree_nodes[(batch,)](
        token, context, draft_tokens, depth, tokens, positions, token.stride(0), context.stride(0),
        draft_tokens.stride(0), draft_tokens.stride(1), depth.stride(0), depth.stride(1), new,
        BLOCK=MAX_NEW_TOKENS, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return tokens, positions


@triton.jit(
    do_not_specialize=["token_stride", "context_stride", "draft_stride_b", "draft_stride_n", "depth_stride_b",
                       "depth_stride_t", "new"],
    do_not_specialize_on_alignment=["token", "context", "draft_tokens", "depth", "tokens", "positions"],
)  # fmt: skip
def _tree_nodes(
    token, context, draft_tokens, depth, tokens, positions, token_stride, context_stride, draft_stride_b,
    draft_stride_n, depth_stride_b, depth_stride_t, new, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    mask = t < new
    root = tl.load(token + b * token_stride)
    draft = tl.load(draft_tokens + b * draft_stride_b + (t - 1) * draft_stride_n, mask=mask & (t > 0), other=0)
    tl.store(tokens + b * new + t, tl.where(t > 0, tl.maximum(draft, 0), root), mask=mask)
    node_depth = tl.load(depth + b * depth_stride_b + t * depth_stride_t, mask=mask, other=0)
    tl.store(positions + b * new + t, (tl.load(context + b * context_stride) + node_depth).to(tl.int32), mask=mask)


def rotations(positions: Tensor, inv_freq: Tensor, signs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `kernels.positions.rotations`."""
    rows = len(positions)
    d = len(inv_freq)
    cos, sin = (torch.empty(rows, 1, d, dtype=dtype, device=positions.device) for _ in range(2))
    block = 4  # positions per program
    pdl = use_pdl(positions.device)
    _rotations[(triton.cdiv(rows, block),)](
        positions, inv_freq, signs, cos, sin, positions.stride(0), rows,
        D=d, BLOCK_N=block, BLOCK_D=triton.next_power_of_2(d), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return cos, sin


@triton.jit(do_not_specialize=["stride", "rows"], do_not_specialize_on_alignment=["positions"])
def _rotations(
    positions, inv_freq, signs, cos, sin, stride, rows,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    mask = (n < rows)[:, None] & (dim < D)[None, :]
    wait_for_predecessor(PDL)
    position = tl.load(positions + n.to(tl.int64) * stride, mask=n < rows, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(inv_freq + dim, mask=dim < D, other=0.0)[None, :]
    c = tl.cos(angle) * tl.load(signs + dim, mask=dim < D, other=0.0)[None, :]
    s = tl.sin(angle) * tl.load(signs + D + dim, mask=dim < D, other=0.0)[None, :]
    to = n[:, None].to(tl.int64) * D + dim[None, :]
    tl.store(cos + to, c.to(cos.dtype.element_ty), mask=mask)
    tl.store(sin + to, s.to(sin.dtype.element_ty), mask=mask)


def window_table(
    slot: Tensor, drafted: Tensor, start: Tensor, window: int, ring: int, stride: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """As `kernels.positions.window_table`."""
    batch = len(slot)
    columns = window + capacity
    table = torch.empty(batch, columns, dtype=torch.int32, device=slot.device)
    num_visible = torch.empty(batch, dtype=torch.int32, device=slot.device)
    _window_table[(batch,)](
        slot, drafted, start, table, num_visible, slot.stride(0), drafted.stride(0), start.stride(0),
        window, ring, stride, capacity, columns, BLOCK=triton.next_power_of_2(columns), num_warps=4,
    )  # fmt: skip
    return table, num_visible


@triton.jit(
    do_not_specialize=[
        "slot_stride",
        "drafted_stride",
        "start_stride",
        "window",
        "ring",
        "stride",
        "capacity",
        "columns",
    ],
    do_not_specialize_on_alignment=["slot", "drafted", "start"],
)
def _window_table(
    slot, drafted, start, table, num_visible, slot_stride, drafted_stride, start_stride,
    window, ring, stride, capacity, columns, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    end = tl.load(drafted + b * drafted_stride)
    visible = end - tl.maximum(tl.load(start + b * start_stride), 0)
    visible = tl.minimum(tl.maximum(visible, 0), window)
    new_page = ring + tl.minimum(column - visible, capacity - 1)
    first_page = tl.load(slot + b * slot_stride) * stride
    page = first_page + tl.where(column < visible, (end - visible + column) % ring, new_page)
    tl.store(table + b * columns + column, page, mask=column < columns)
    tl.store(num_visible + b, visible)
