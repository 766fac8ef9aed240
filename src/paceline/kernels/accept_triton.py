"""The GPU form of `kernels.accept`: one program per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device import use_pdl
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor
from paceline.kernels.positions_triton import MAX_NEW_TOKENS


def count_accepted(draft_tokens: Tensor, target_tokens: Tensor, usable: Tensor) -> Tensor:
    """As `kernels.accept.count_accepted`."""
    batch, count = draft_tokens.shape
    assert count < MAX_NEW_TOKENS, "a tree's visibility is a mask of as many bits"
    num_accepted = torch.empty(batch, dtype=torch.int64, device=draft_tokens.device)
    pdl = use_pdl(draft_tokens.device)
    _count_accepted[(batch,)](
        draft_tokens, target_tokens, usable, num_accepted, draft_tokens.stride(0), draft_tokens.stride(1),
        target_tokens.stride(0), target_tokens.stride(1), usable.stride(0), usable.stride(1), count,
        BLOCK=MAX_NEW_TOKENS, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return num_accepted


@triton.jit(
    do_not_specialize=["draft_stride_b", "draft_stride_n", "target_stride_b", "target_stride_n", "usable_stride_b",
                       "usable_stride_n", "count"],
    do_not_specialize_on_alignment=["draft_tokens", "target_tokens", "usable"],
)  # fmt: skip
def _count_accepted(
    draft_tokens, target_tokens, usable, num_accepted, draft_stride_b, draft_stride_n, target_stride_b,
    target_stride_n, usable_stride_b, usable_stride_n, count, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    mask = i < count
    draft = tl.load(draft_tokens + b * draft_stride_b + i * draft_stride_n, mask=mask, other=0).to(tl.int64)
    target = tl.load(target_tokens + b * target_stride_b + i * target_stride_n, mask=mask, other=-1).to(tl.int64)
    has_slot = tl.load(usable + b * usable_stride_b + (i + 1) * usable_stride_n, mask=mask, other=0).to(tl.int32)
    rejected = mask & ((draft != target) | (has_slot == 0))
    tl.store(num_accepted + b, tl.min(tl.where(rejected, i, count), 0).to(tl.int64))


def advance_rows(
    token: Tensor,
    context: Tensor,
    slot: Tensor,
    min_left: Tensor,
    sampled: Tensor,
    logprobs: Tensor,
    num_accepted: Tensor | None = None,
) -> Tensor:
    """As `kernels.accept.advance_rows`."""
    batch, count = sampled.shape
    columns = token, context, slot, min_left
    assert count <= MAX_NEW_TOKENS, "a pass samples no more tokens than a tree has nodes"
    assert len({c.stride(0) for c in columns}) == 1, "columns of one table"
    packed = torch.empty(batch, 2 * count + 1, dtype=torch.int32, device=token.device)
    pdl = use_pdl(token.device)
    _advance_rows[(batch,)](
        *columns, sampled, logprobs, num_accepted, packed, token.stride(0), sampled.stride(0), sampled.stride(1),
        logprobs.stride(0), logprobs.stride(1), 0 if num_accepted is None else num_accepted.stride(0), count,
        ACCEPTED=num_accepted is not None, BLOCK=1 if count == 1 else MAX_NEW_TOKENS, PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return packed


@triton.jit(
    do_not_specialize=["stride", "sampled_stride_b", "sampled_stride_n", "logprobs_stride_b", "logprobs_stride_n",
                       "accepted_stride", "count"],
    do_not_specialize_on_alignment=["token", "context", "slot", "min_left", "sampled", "logprobs", "num_accepted"],
)  # fmt: skip
def _advance_rows(
    token, context, slot, min_left, sampled, logprobs, num_accepted, packed,
    stride, sampled_stride_b, sampled_stride_n, logprobs_stride_b, logprobs_stride_n, accepted_stride, count,
    ACCEPTED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    last = 0
    if ACCEPTED:
        last = tl.load(num_accepted + b * accepted_stride).to(tl.int32)
    sampled += b * sampled_stride_b
    mask = i < count
    tokens = tl.load(sampled + i * sampled_stride_n, mask=mask, other=0).to(tl.int32)
    logprob = tl.load(logprobs + b * logprobs_stride_b + i * logprobs_stride_n, mask=mask, other=0.0).to(tl.float32)
    packed += b * (2 * count + 1)
    tl.store(packed + i, tokens, mask=mask)
    tl.store(packed + count + i, logprob.to(tl.int32, bitcast=True), mask=mask)
    tl.store(packed + 2 * count, last)
    row = b * stride
    tl.store(token + row, tl.load(sampled + last * sampled_stride_n).to(tl.int32))
    new = tl.where(tl.load(slot + row) > 0, last + 1, 0)  # rows that only pad a graph do not advance
    tl.store(context + row, tl.load(context + row) + new)
    tl.store(min_left + row, tl.maximum(tl.load(min_left + row) - new, 0))
