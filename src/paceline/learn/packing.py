"""Answers packed end to end into micro-batches of about equal size: no padding is ever computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core import Trajectory, TrajectoryFacts


@dataclass
class MicroBatch:
    """A micro-batch: whole sequences in one row, and where their answers lie."""

    answers: list[int]  # indices into the batch
    lengths: list[int]  # of the sequences in the row
    tokens: Tensor  # [N]
    predicts: Tensor  # [R] places in the row whose next token is part of an answer
    targets: Tensor  # [R] those tokens
    rollout_logp: Tensor  # [R]


def plan(lengths: list[int], micro_tokens: int) -> list[list[int]]:
    """Indices of sequences per micro-batch, none above `micro_tokens` unless a single sequence is: first fit, longest
    first, which wastes little and depends on nothing but the lengths."""
    bins: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for place, (size, members) in enumerate(bins):
            if size + lengths[i] <= micro_tokens:
                bins[place] = (size + lengths[i], [*members, i])
                break
        else:
            bins.append((lengths[i], [i]))
    return [sorted(members) for _, members in bins]


def pack(
    answers: Sequence[Trajectory | TrajectoryFacts], members: list[int], device: torch.device, dtype: torch.dtype
) -> MicroBatch:
    row: list[int] = []
    predicts: list[int] = []
    targets: list[int] = []
    logp: list[float] = []
    for i in members:
        a = answers[i]
        assert isinstance(a, Trajectory), "what is packed is here"
        start = len(row) + len(a.prompt) - 1  # the last prompt token predicts the first token of the answer
        predicts += range(start, start + len(a.tokens))
        row += [*a.prompt, *a.tokens]
        targets += a.tokens
        logp += a.logprobs
    return MicroBatch(
        members,
        [answers[i].length for i in members],
        torch.tensor(row, device=device),
        torch.tensor(predicts, device=device),
        torch.tensor(targets, device=device),
        torch.tensor(logp, device=device, dtype=dtype),
    )
