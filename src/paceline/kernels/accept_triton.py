"""The GPU form of `kernels.landing`: a program per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.device import starts_early
from paceline.kernels.hopper.pdl_triton import wait_for_predecessor
from paceline.kernels.positions_triton import MOST_NEW


def count_accepted(guesses: Tensor, winners: Tensor, usable: Tensor) -> Tensor:
    """As `kernels.landing.agreed`."""
    batch, count = guesses.shape
    assert count < MOST_NEW, "a tree's visibility is a mask of as many bits"
    held = torch.empty(batch, dtype=torch.int64, device=guesses.device)
    early = starts_early(guesses.device)
    _count_accepted[(batch,)](
        guesses, winners, usable, held, guesses.stride(0), guesses.stride(1), winners.stride(0), winners.stride(1),
        usable.stride(0), usable.stride(1), count, BLOCK=MOST_NEW, PDL=early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
    return held


@triton.jit(
    do_not_specialize=["guesses_stride", "guess_stride", "winners_stride", "winner_stride", "usable_stride",
                       "use_stride", "count"],
    do_not_specialize_on_alignment=["guesses", "winners", "usable"],
)  # fmt: skip
def _count_accepted(
    guesses, winners, usable, held, guesses_stride, guess_stride, winners_stride, winner_stride,
    usable_stride, use_stride, count, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    there = i < count
    guess = tl.load(guesses + b * guesses_stride + i * guess_stride, mask=there, other=0).to(tl.int64)
    winner = tl.load(winners + b * winners_stride + i * winner_stride, mask=there, other=-1).to(tl.int64)
    placed = tl.load(usable + b * usable_stride + (i + 1) * use_stride, mask=there, other=0).to(tl.int32)
    wrong = there & ((guess != winner) | (placed == 0))
    tl.store(held + b, tl.min(tl.where(wrong, i, count), 0).to(tl.int64))


def advance_rows(
    token: Tensor,
    context: Tensor,
    slot: Tensor,
    min_left: Tensor,
    drawn: Tensor,
    logprobs: Tensor,
    held: Tensor | None = None,
) -> Tensor:
    """As `kernels.landing.land`."""
    batch, count = drawn.shape
    columns = token, context, slot, min_left
    assert count <= MOST_NEW, "a pass draws no more than a tree has members"
    assert len({c.stride(0) for c in columns}) == 1, "columns of one table"
    packed = torch.empty(batch, 2 * count + 1, dtype=torch.int32, device=token.device)
    early = starts_early(token.device)
    _advance_rows[(batch,)](
        *columns, drawn, logprobs, held, packed, token.stride(0), drawn.stride(0), drawn.stride(1),
        logprobs.stride(0), logprobs.stride(1), 0 if held is None else held.stride(0), count,
        HELD=held is not None, BLOCK=1 if count == 1 else MOST_NEW, PDL=early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
    return packed


@triton.jit(
    do_not_specialize=["stride", "drawn_stride_b", "drawn_stride_n", "logprobs_stride_b", "logprobs_stride_n",
                       "held_stride", "count"],
    do_not_specialize_on_alignment=["token", "context", "slot", "min_left", "drawn", "logprobs", "held"],
)  # fmt: skip
def _advance_rows(
    token, context, slot, min_left, drawn, logprobs, held, packed,
    stride, drawn_stride_b, drawn_stride_n, logprobs_stride_b, logprobs_stride_n, held_stride, count,
    HELD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    kept = 0
    if HELD:
        kept = tl.load(held + b * held_stride).to(tl.int32)
    drawn += b * drawn_stride_b
    there = i < count
    tokens = tl.load(drawn + i * drawn_stride_n, mask=there, other=0).to(tl.int32)
    logprob = tl.load(logprobs + b * logprobs_stride_b + i * logprobs_stride_n, mask=there, other=0.0).to(tl.float32)
    packed += b * (2 * count + 1)
    tl.store(packed + i, tokens, mask=there)
    tl.store(packed + count + i, logprob.to(tl.int32, bitcast=True), mask=there)
    tl.store(packed + 2 * count, kept)
    row = b * stride
    tl.store(token + row, tl.load(drawn + kept * drawn_stride_n).to(tl.int32))
    new = tl.where(tl.load(slot + row) > 0, kept + 1, 0)  # rows that only pad a graph stay where they are
    tl.store(context + row, tl.load(context + row) + new)
    tl.store(min_left + row, tl.maximum(tl.load(min_left + row) - new, 0))
