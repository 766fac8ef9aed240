"""What a pass ends with: which guesses of a chain hold, the device's rows moved on, and what the host will read.

In plain PyTorch these are twenty operations on a handful of numbers, and each would be a kernel of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels


@dispatch("accept_triton", lambda guesses, *_: has_kernels(guesses))
def count_accepted(guesses: Tensor, winners: Tensor, usable: Tensor) -> Tensor:
    """How many guesses int [B, n] of a chain hold, int64 [B]: up to the first that is not what won the race, int64
    winners [B, n + 1], where it was made, or that had no place in the cache: usable bool [B, n + 1]."""
    right = (guesses == winners[:, :-1]) & usable[:, 1:]
    return right.long().cumprod(1).sum(1)


@dispatch("accept_triton", lambda token, *_: has_kernels(token))
def advance_rows(
    token: Tensor,
    context: Tensor,
    slot: Tensor,
    min_left: Tensor,
    drawn: Tensor,
    logprobs: Tensor,
    held: Tensor | None = None,
) -> Tensor:
    """Of the tokens drawn [B, n], int, the first 1 + held [B] count, or the first: columns of the device's rows, int32
    [B] each, move on by them, but for rows that only pad a graph (slot 0) -> what `pack_output` makes of it."""
    kept = torch.zeros_like(context) if held is None else held.int()
    token.copy_(drawn.gather(1, kept.long()[:, None])[:, 0])
    new = (kept + 1).where(slot > 0, 0)
    context.add_(new)
    min_left.sub_(new).clamp_(min=0)
    return pack_output(drawn, logprobs, kept)


def pack_output(tokens: Tensor, logprobs: Tensor, held: Tensor | None = None) -> Tensor:
    """[B, n], [B, n] and [B] -> int32 [B, 2 n + 1], with the floats' bits riding along as integers."""
    held = tokens.new_zeros(len(tokens)) if held is None else held
    return torch.cat((tokens.int(), logprobs.float().view(torch.int32), held.int()[:, None]), 1)
