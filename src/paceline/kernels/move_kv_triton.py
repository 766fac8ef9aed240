"""The GPU form of `kernels.move_kv`: all layers, keys and values in one kernel instead of a gather and a scatter
each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def move_accepted_kv(k: Tensor, v: Tensor, slots: Tensor, path: Tensor, num_accepted: Tensor) -> None:
    """As `kernels.move_kv.move_accepted_kv`."""
    layers, rows, d = k.shape
    batch, _, kv_heads = slots.shape
    max_depth = path.shape[1] - 1
    block = max(8, triton.next_power_of_2(max_depth))  # one compiled variant for all depths up to 8
    _move_accepted_kv[(layers, batch, kv_heads)](
        k, v, slots, path, num_accepted, rows, slots.stride(0), slots.stride(1), slots.stride(2),
        path.stride(0), path.stride(1), num_accepted.stride(0), max_depth,
        D=d, BLOCK_L=block, BLOCK_D=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["slots_stride_b", "slots_stride_t", "slots_stride_h", "path_stride_b", "path_stride_l",
                       "accepted_stride", "max_depth"],
    do_not_specialize_on_alignment=["slots", "path", "num_accepted"],
)  # fmt: skip
def _move_accepted_kv(
    k, v, slots, path, num_accepted, rows, slots_stride_b, slots_stride_t, slots_stride_h, path_stride_b,
    path_stride_l, accepted_stride, max_depth, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    head = tl.program_id(2)
    depth = 1 + tl.arange(0, BLOCK_L)
    accepted = (depth <= max_depth) & (depth <= tl.load(num_accepted + b * accepted_stride))
    node = tl.load(path + b * path_stride_b + depth * path_stride_l, mask=accepted, other=0)
    own_slots = slots + b * slots_stride_b + head * slots_stride_h
    source = tl.load(own_slots + node * slots_stride_t, mask=accepted, other=0)
    target = tl.load(own_slots + depth * slots_stride_t, mask=accepted, other=0)
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (accepted & (source != target))[:, None] & (dim < D)
    read, write = (layer * rows + source)[:, None] * D + dim, (layer * rows + target)[:, None] * D + dim
    keys = tl.load(k + read, mask=mask)
    values = tl.load(v + read, mask=mask)
    tl.debug_barrier()  # one node's target may be another's source: all are read before any is written
    tl.store(k + write, keys, mask=mask)
    tl.store(v + write, values, mask=mask)
