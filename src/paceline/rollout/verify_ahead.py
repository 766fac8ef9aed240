"""Verifying tokens that were written ahead: drafts of any length, by a policy that has been updated since.

A prefill pass runs the policy over a sequence and all that was written ahead of it. Behind each token it samples with
the known noise of that position, as decoding would; up to the first token that differs, what was written is what the
policy would have written itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.kernels.noise import noise_ahead, noise_dtype
from paceline.model.decoder import Decoder
from paceline.rollout.filters import Filters
from paceline.rollout.sampling import AT_ONCE, SamplingRows, draw

if TYPE_CHECKING:
    from paceline.rollout.scheduler import Fill


class Accepted(NamedTuple):
    """Tokens that were written ahead and accepted, with the log-probabilities that the policy gives them now."""

    tokens: list[int]
    logprobs: list[float]


NOTHING = Accepted([], [])


def verify_ahead(
    model: Decoder, fills: Many[Fill], hidden: Tensor, rows: SamplingRows, filters: Filters
) -> list[Accepted]:
    """`hidden` [N, hidden] of all tokens of the fills, end to end; `rows` are the sampling parameters of the running
    batch."""
    device = hidden.device
    ends = torch.tensor([len(fill.tokens) for fill in fills]).cumsum(0).tolist()
    drafted = [(end, fill) for end, fill in zip(ends, fills, strict=True) if fill.ahead]
    # A token is sampled from the hidden state before it.
    index = torch.cat([torch.arange(end - fill.ahead, end) for end, fill in drafted]).to(device) - 1
    row = torch.tensor([fill.row for _, fill in drafted for _ in range(fill.ahead)], device=device)
    offset = torch.cat([torch.arange(fill.ahead) for _, fill in drafted]).to(device)
    first = torch.tensor([len(fill.tokens) - fill.ahead for _, fill in drafted for _ in range(fill.ahead)])
    positions = first.to(device) + offset
    tokens: list[int] = []
    logprobs: list[float] = []
    at_once = max(1, AT_ONCE // model.config.vocab_size)
    for begin in range(0, len(index), at_once):
        some = slice(begin, begin + at_once)
        sampled = _draw(model, hidden[index[some]], rows, row[some], offset[some], positions[some], filters)
        tokens += sampled[0].tolist()
        logprobs += sampled[1].tolist()
    out = []
    begin = 0
    for fill in fills:
        end = begin + fill.ahead
        accepted = _common_beginning(fill.tokens[len(fill.tokens) - fill.ahead :], tokens[begin:end])
        out.append(Accepted(tokens[begin : begin + accepted], logprobs[begin : begin + accepted]))
        begin = end
    return out


def _draw(
    model: Decoder, hidden: Tensor, rows: SamplingRows, row: Tensor, offset: Tensor, positions: Tensor, filters: Filters
) -> tuple[Tensor, Tensor]:
    """Sample at `positions` [N] of the requests in these rows, which lie `offset` [N] tokens ahead of each."""
    each = SamplingRows(*(x[row] for x in vars(rows).values()))
    each = replace(each, min_left=each.min_left - offset.to(each.min_left.dtype))
    noise = lambda: noise_ahead(  # noqa: E731
        each.keys, positions, 1, model.config.vocab_size, noise_dtype(model.dtype)
    )[:, 0]
    return draw(model.logits(hidden), each, positions.int(), filters, noise)


def _common_beginning(a: Many[int], b: Many[int]) -> int:
    """How many tokens they have in common from the first one on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
