"""A round that was launched and has not been read yet, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.draft.decision import Choice
from paceline.draft.strategy import MAX_TREE_NODES, Strategy


class SampledTokens(NamedTuple):
    """What a pass has sampled: for each row its tokens and log-probabilities, of which the first num_tokens[row] count:
    the accepted draft tokens, and the bonus token."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    num_tokens: list[int]


class PendingOutput:
    """What a pass has sampled, on its way to the host."""

    def __init__(self, tokens: Tensor, logprobs: Tensor, num_accepted: Tensor, done: torch.cuda.Event | None = None):
        self._parts = (tokens, logprobs, num_accepted)
        self._done = done

    def read(self) -> SampledTokens:
        """Wait for it."""
        if self._done is not None:
            self._done.synchronize()
        tokens, logprobs, num_accepted = self._parts
        return SampledTokens(tokens.tolist(), logprobs.tolist(), (num_accepted + 1).tolist())


class PinnedOutput:
    """Pinned memory that outputs are copied to: two buffers, because a round may be launched before the last was
    read."""

    def __init__(self, rows: int):
        self._buffers = [
            torch.empty(rows * (2 * MAX_TREE_NODES + 3), dtype=torch.int32, pin_memory=True) for _ in range(2)
        ]

    def fetch(self, packed: Tensor) -> PendingOutput:
        """What `kernels.accept.pack_output` has packed, in one copy, which the host does not wait for."""
        self._buffers.reverse()
        buffer = self._buffers[0][: packed.numel()].view(packed.shape)
        buffer.copy_(packed, non_blocking=True)
        n = packed.shape[1] // 2
        done = torch.cuda.current_stream().record_event()
        return PendingOutput(buffer[:, :n], buffer[:, n:-1].view(torch.float32), buffer[:, -1], done)


@dataclass
class InFlightRound:
    """A round that was launched, and what is to be noted of it once it has been read."""

    choice: Choice
    output: PendingOutput
    started: float
    captured: bool = False
    """Whether a graph was captured on the way."""
    catch_up_rows: int = 0
    """Rows of passes that its drafter needed first, because it had not run."""
    timed: bool = False
    """Whether the time of its draft was measured."""

    @property
    def strategy(self) -> Strategy:
        return self.choice.strategy
