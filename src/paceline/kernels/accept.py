"""The end of a pass: how many draft tokens of a chain are accepted, the advance of the device's request rows by them,
and the packed output that the host reads.

In plain PyTorch these are twenty operations on a handful of numbers, and each would be a kernel launch of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels


@dispatch("accept_triton", lambda draft_tokens, *_: has_kernels(draft_tokens))
def count_accepted(draft_tokens: Tensor, target_tokens: Tensor, usable: Tensor) -> Tensor:
    """num_accepted int64 [B] of a chain of draft_tokens int [B, n]: the length of the longest prefix in which every
    draft token i equals the policy's own token target_tokens[:, i], int64 [B, n + 1], and has a KV slot of its own:
    usable[:, i + 1], bool [B, n + 1]."""
    right = (draft_tokens == target_tokens[:, :-1]) & usable[:, 1:]
    return right.long().cumprod(1).sum(1)


@dispatch("accept_triton", lambda token, *_: has_kernels(token))
def advance_rows(
    token: Tensor,
    context: Tensor,
    slot: Tensor,
    min_left: Tensor,
    sampled: Tensor,
    logprobs: Tensor,
    num_accepted: Tensor | None = None,
) -> Tensor:
    """Advance the device's request rows, in place, by the first 1 + num_accepted [B] of the sampled tokens int [B, n]
    (by one where num_accepted is None). token, context, slot and min_left are columns of one table, int32 [B] each:
    the last token, the context length, the slot (0: a row that only pads a graph, which does not advance), and the
    tokens left until the minimum length -> the packed output of `pack_output`."""
    last = torch.zeros_like(context) if num_accepted is None else num_accepted.int()
    token.copy_(sampled.gather(1, last.long()[:, None])[:, 0])
    new = (last + 1).where(slot > 0, 0)
    context.add_(new)
    min_left.sub_(new).clamp_(min=0)
    return pack_output(sampled, logprobs, last)


def pack_output(tokens: Tensor, logprobs: Tensor, num_accepted: Tensor | None = None) -> Tensor:
    """tokens [B, n], logprobs [B, n] and num_accepted [B] -> int32 [B, 2 n + 1], in this order, so that the host reads
    one tensor; the bits of the float32 log-probabilities are reinterpreted as integers."""
    num_accepted = tokens.new_zeros(len(tokens)) if num_accepted is None else num_accepted
    return torch.cat((tokens.int(), logprobs.float().view(torch.int32), num_accepted.int()[:, None]), 1)
