"""What a run's work costs: seconds of rounds by batch size, and of everything else in a step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

FORWARD_SHARE = 1 / 3  # of forward and backward: a pass that only verifies tokens


@dataclass(frozen=True)
class BatchCurve:
    """Seconds by batch size, measured at some sizes."""

    points: tuple[tuple[float, float], ...]
    """(batch, seconds), by batch."""

    def __post_init__(self) -> None:
        assert self.points, "at least one batch size was measured"
        assert all(seconds > 0 for _, seconds in self.points)

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> BatchCurve:
        return cls(tuple(sorted(points)))

    def at(self, batch: float) -> float:
        """On the line between its neighbours, by the logarithm of the batch size. Below the smallest measured size what
        that one takes, and beyond the largest in proportion: the device is taken to be full."""
        i = bisect_left(self.points, (batch, 0.0))
        if i == 0:
            return self.points[0][1]
        last, high = self.points[-1]
        if i == len(self.points):
            return high * batch / last
        (a, low), (b, high) = self.points[i - 1], self.points[i]
        if a == b:
            return high
        return low + (high - low) * math.log(batch / a) / math.log(b / a)

    def scaled(self, factor: float) -> BatchCurve:
        return BatchCurve(tuple((batch, seconds * factor) for batch, seconds in self.points))


@dataclass(frozen=True)
class StepCosts:
    """Of one worker on its device, where it does not say otherwise. Seconds."""

    plain: BatchCurve
    """A round of plain decoding."""
    adaptive: BatchCurve
    """In which every sequence gains a token on average, as the run's tuner decoded: rounds of all strategies over the
    plain rounds that would have written as much."""
    prefill_s: float
    """Admitting a request."""
    gradient_token_s: float
    """Forward and backward over a token of the update."""
    update_s: float
    """The rest of an update, however many workers there are: optimizer, collectives, messages."""
    rollout_s: float = 0.0
    """From the beginning of a rollout to its first round, and from its last round to its end."""
    after_s: float = 0.0
    """Other parts of a step: the last rewards, merging drafters, saving, on average."""

    @property
    def verify_token_s(self) -> float:
        """A pass of the policy over a token whose successor is known: computing a prefix again, verifying what was
        written ahead."""
        return FORWARD_SHARE * self.gradient_token_s

    def on(self, bandwidth: float, compute: float) -> StepCosts:
        """On a device with so many times the memory bandwidth and arithmetic: rounds go with the first, passes over
        many tokens with the second."""
        return replace(
            self,
            plain=self.plain.scaled(1 / bandwidth),
            adaptive=self.adaptive.scaled(1 / bandwidth),
            prefill_s=self.prefill_s / compute,
            gradient_token_s=self.gradient_token_s / compute,
        )


@dataclass(frozen=True)
class StepWork:
    """What a step has to do."""

    lengths: tuple[int, ...]
    """Tokens of each request's completion, group by group."""
    group: int
    """Requests of a prompt."""
    update_tokens: float
    """That gradients are computed for, prompts included."""
    prompt_tokens: float = 0.0
    """Of each request."""

    def times(self, count: int) -> StepWork:
        """So many times as much of the same."""
        return replace(self, lengths=self.lengths * count, update_tokens=self.update_tokens * count)
