"""A round that the device is busy with, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.draft.strategy import MAX_NODES, Strategy


class SampledTokens(NamedTuple):
    """What a pass has drawn: for each row its tokens and log-probabilities, of which the first held[row] count."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    held: list[int]


class PendingOutput:
    """What a pass has drawn, on its way to the host."""

    def __init__(self, tokens: Tensor, logprobs: Tensor, held: Tensor, done: torch.cuda.Event | None = None):
        self._parts, self._done = (tokens, logprobs, held), done

    def read(self) -> SampledTokens:
        """Wait for it."""
        if self._done is not None:
            self._done.synchronize()
        tokens, logprobs, held = self._parts
        return SampledTokens(tokens.tolist(), logprobs.tolist(), (held + 1).tolist())


class PinnedOutput:
    """Where results come down on the host: two places, because a round may begin before the last one was read."""

    def __init__(self, rows: int):
        self._rooms = [torch.empty(rows * (2 * MAX_NODES + 3), dtype=torch.int32, pin_memory=True) for _ in range(2)]

    def fetch(self, packed: Tensor) -> PendingOutput:
        """What `kernels.landing.pack` has packed, in one copy, which the host does not wait for."""
        self._rooms.reverse()
        room = self._rooms[0][: packed.numel()].view(packed.shape)
        room.copy_(packed, non_blocking=True)
        n = packed.shape[1] // 2
        done = torch.cuda.current_stream().record_event()
        return PendingOutput(room[:, :n], room[:, n:-1].view(torch.float32), room[:, -1], done)


@dataclass
class InFlightRound:
    """A round that was launched, and what is to be noted of it once it has been read."""

    strategy: Strategy
    result: PendingOutput
    started: float
    captured: bool = False
    """Whether a graph was captured on the way."""
    made_up: int = 0
    """Tokens that the drafter had to take in first, because it had not run."""
    timed: bool = False
    """Whether the timer asked how long guessing took."""
    exploring: bool = False
    """Whether its strategy was only being looked at."""
