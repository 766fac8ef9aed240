"""The GPU form of `kernels.feature_ring`: one program per sampled token and block of features."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

FEATURE_BLOCK = 2048  # numbers of a feature vector that a program copies


def write_features(
    ring: Tensor,
    tokens: Tensor,
    slot: Tensor,
    position: Tensor,
    features: Tensor,
    sampled: Tensor,
    path: Tensor | None = None,
    num_accepted: Tensor | None = None,
) -> None:
    """As `kernels.feature_ring.write_features`."""
    _, window, width = ring.shape
    batch, count = sampled.shape
    _write_features[(batch * count, triton.cdiv(width, FEATURE_BLOCK))](
        ring, tokens, slot, position, features, sampled, path, num_accepted, window, width, count,
        slot.stride(0), position.stride(0), features.stride(0), features.stride(1), sampled.stride(0),
        sampled.stride(1), *((0, 0) if path is None else path.stride()),
        0 if num_accepted is None else num_accepted.stride(0),
        PATH=path is not None, ACCEPTED=num_accepted is not None, BLOCK=FEATURE_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["count", "slot_stride", "position_stride", "sampled_stride_b", "sampled_stride_t",
                       "path_stride_b", "path_stride_t", "accepted_stride"],
    do_not_specialize_on_alignment=["slot", "position", "sampled", "path", "num_accepted"],
)  # fmt: skip
def _write_features(
    ring, tokens, slot, position, features, sampled, path, num_accepted, window, width, count,
    slot_stride, position_stride, features_stride_b, features_stride_t, sampled_stride_b, sampled_stride_t,
    path_stride_b, path_stride_t, accepted_stride,
    PATH: tl.constexpr, ACCEPTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // count
    t = tl.program_id(0) % count
    row = tl.load(slot + b * slot_stride).to(tl.int64)
    if ACCEPTED:
        row = tl.where(t <= tl.load(num_accepted + b * accepted_stride), row, 0)
    at = tl.load(position + b * position_stride) + t
    node = t.to(tl.int64)
    if PATH:
        node = tl.load(path + b * path_stride_b + t * path_stride_t).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    value = tl.load(features + b * features_stride_b + node * features_stride_t + i, mask=mask)
    tl.store(ring + (row * window + at % window) * width + i, value, mask=mask)
    if tl.program_id(1) == 0:
        token = tl.load(sampled + b * sampled_stride_b + t * sampled_stride_t)
        tl.store(tokens + row * window + (at + 1) % window, token.to(tl.int32))
