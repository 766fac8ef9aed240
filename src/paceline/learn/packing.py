"""Trajectories packed end to end into micro-batches of about equal size: no padding is ever computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core import Trajectories, Trajectory


@dataclass
class MicroBatch:
    """Whole trajectories in one row, and where their answers lie in it."""

    indices: list[int]  # indices into the update batch
    lengths: list[int]  # tokens of each, with its prompt
    tokens: Tensor  # [N]
    predicts: Tensor  # [R] positions in the row whose next token the policy wrote in an answer
    targets: Tensor  # [R] those tokens
    rollout_logp: Tensor  # [R]


def plan(lengths: list[int], micro_tokens: int) -> list[list[int]]:
    """Indices of sequences per micro-batch, none above `micro_tokens` unless a single sequence is: first fit, longest
    first, which wastes little and depends on nothing but the lengths."""
    bins: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for number, (size, indices) in enumerate(bins):
            if size + lengths[i] <= micro_tokens:
                bins[number] = (size + lengths[i], [*indices, i])
                break
        else:
            bins.append((lengths[i], [i]))
    return [sorted(indices) for _, indices in bins]


def pack(trajectories: Trajectories, indices: list[int], device: torch.device, dtype: torch.dtype) -> MicroBatch:
    """Put these trajectories end to end; `dtype` is that of the log-probabilities."""
    row: list[int] = []
    predicts: list[int] = []
    targets: list[int] = []
    logp: list[float] = []
    for i in indices:
        t = trajectories[i]
        assert isinstance(t, Trajectory), "what is packed is here"
        start = len(row) + len(t.prompt) - 1  # the last prompt token predicts the first token of the answer
        written = t.written  # nothing is learned of what the policy has observed
        predicts += [start + i for i in written]
        row += [*t.prompt, *t.tokens]
        targets += [t.tokens[i] for i in written]
        logp += [t.logprobs[i] for i in written]
    return MicroBatch(
        indices,
        [trajectories[i].length for i in indices],
        torch.tensor(row, device=device),
        torch.tensor(predicts, device=device),
        torch.tensor(targets, device=device),
        torch.tensor(logp, device=device, dtype=dtype),
    )
