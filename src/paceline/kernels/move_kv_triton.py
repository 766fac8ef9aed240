"""The GPU form of settling a tree: all layers, keys and values in one kernel instead of a gather and a scatter each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def move_accepted_kv(k: Tensor, v: Tensor, slots: Tensor, way: Tensor, held: Tensor) -> None:
    """As `kernels.settle.settle`."""
    layers, rows, d = k.shape
    batch, _, kv_heads = slots.shape
    depth = way.shape[1] - 1
    block = max(8, triton.next_power_of_2(depth))  # what is less deep need not be compiled apart
    _move_accepted_kv[(layers, batch, kv_heads)](
        k, v, slots, way, held, rows, slots.stride(0), slots.stride(1), slots.stride(2), way.stride(0), way.stride(1),
        held.stride(0), depth,
        D=d, BLOCK_L=block, BLOCK_D=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["slots_stride_b", "slots_stride_t", "slots_stride_h", "way_stride_b", "way_stride_l",
                       "held_stride", "depth"],
    do_not_specialize_on_alignment=["slots", "way", "held"],
)  # fmt: skip
def _move_accepted_kv(
    k, v, slots, way, held, rows, slots_stride_b, slots_stride_t, slots_stride_h, way_stride_b, way_stride_l,
    held_stride, depth, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    head = tl.program_id(2)
    level = 1 + tl.arange(0, BLOCK_L)
    holds = (level <= depth) & (level <= tl.load(held + b * held_stride))
    member = tl.load(way + b * way_stride_b + level * way_stride_l, mask=holds, other=0)
    own = slots + b * slots_stride_b + head * slots_stride_h
    source = tl.load(own + member * slots_stride_t, mask=holds, other=0)
    target = tl.load(own + level * slots_stride_t, mask=holds, other=0)
    dim = tl.arange(0, BLOCK_D)[None, :]
    moves = (holds & (source != target))[:, None] & (dim < D)
    come, go = (layer * rows + source)[:, None] * D + dim, (layer * rows + target)[:, None] * D + dim
    keys = tl.load(k + come, mask=moves)
    values = tl.load(v + come, mask=moves)
    tl.debug_barrier()  # a place that one guess leaves may be where another goes: all are read before any is written
    tl.store(k + go, keys, mask=moves)
    tl.store(v + go, values, mask=moves)
