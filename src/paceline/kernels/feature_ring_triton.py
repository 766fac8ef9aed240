"""The GPU form of `kernels.ring`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def write_features(
    ring: Tensor,
    tokens: Tensor,
    slot: Tensor,
    place: Tensor,
    features: Tensor,
    drawn: Tensor,
    way: Tensor | None = None,
    held: Tensor | None = None,
) -> None:
    """As `kernels.ring.put`."""
    _, window, width = ring.shape
    batch, count = drawn.shape
    _write_features[(batch * count, triton.cdiv(width, BLOCK))](
        ring, tokens, slot, place, features, drawn, way, held, window, width, count,
        slot.stride(0), place.stride(0), features.stride(0), features.stride(1), drawn.stride(0), drawn.stride(1),
        *((0, 0) if way is None else way.stride()), 0 if held is None else held.stride(0),
        WAY=way is not None, HELD=held is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["count", "slot_stride", "place_stride", "drawn_stride_b", "drawn_stride_t",
                       "way_stride_b", "way_stride_t", "held_stride"],
    do_not_specialize_on_alignment=["slot", "place", "drawn", "way", "held"],
)  # fmt: skip
def _write_features(
    ring, tokens, slot, place, features, drawn, way, held, window, width, count,
    slot_stride, place_stride, features_stride_b, features_stride_t, drawn_stride_b, drawn_stride_t,
    way_stride_b, way_stride_t, held_stride,
    WAY: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // count
    t = tl.program_id(0) % count
    row = tl.load(slot + b * slot_stride).to(tl.int64)
    if HELD:
        row = tl.where(t <= tl.load(held + b * held_stride), row, 0)
    at = tl.load(place + b * place_stride) + t
    member = t.to(tl.int64)
    if WAY:
        member = tl.load(way + b * way_stride_b + t * way_stride_t).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < width
    value = tl.load(features + b * features_stride_b + member * features_stride_t + i, mask=there)
    tl.store(ring + (row * window + at % window) * width + i, value, mask=there)
    if tl.program_id(1) == 0:
        token = tl.load(drawn + b * drawn_stride_b + t * drawn_stride_t)
        tl.store(tokens + row * window + (at + 1) % window, token.to(tl.int32))
