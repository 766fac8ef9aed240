"""Stragglers: sequences for which drafts are accepted least. A step ends with its slowest sequence.

Let a drafted round take c seconds and give the average sequence m tokens and the slowest one w. Where all sequences are
equally long, the slowest has a share 1 - w / m of its tokens left when the average one ends, and decodes them alone at
a seconds each: a token takes c / m + (1 - w / m) a seconds. In a long tail the sequence that is waited for may be any,
so the second term counts only as much as completions ended together in the last rollout.

How slow the slowest one is, is estimated from the drafts of the present rollout (`slowest`), and known from the last
one, whose longest sequence took part in every round: what drafts gave it is its length less the rounds. The lower one
counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.draft.acceptance import ENOUGH, HORIZON

Floats = NDArray[np.float64]


def slowest(reached: Floats, accepted: Floats) -> float | None:
    """Acceptance rate of the slowest sequence over that of all; None while too little is known. Of each sequence
    `reached` draft tokens were verified behind accepted ones only, and `accepted` of them were accepted.

    The lowest of many rates is low by chance alone. So each is drawn towards that of all, and given the benefit of two
    standard deviations."""
    total = float(reached.sum())
    if total < ENOUGH * len(reached):
        return None
    rate = max(float(accepted.sum()) / total, 1e-3)
    seen = reached + ENOUGH
    rates = (accepted + ENOUGH * rate) / seen + 2 * np.sqrt(rate * (1 - rate) / seen)
    return min(1.0, float(rates.min()) / rate)


@dataclass
class Stragglers:
    together: float = 1.0
    """How much the completions of the last rollout ended together: their median length over the longest."""
    ratios: dict[int, float] = field(default_factory=dict)
    """By batch size: acceptance rate of the slowest sequence over that of all, when that was last seen."""
    gain: float = 1.0
    """Draft tokens that were accepted per round for the sequence that ended last, over those of all, in the last
    rollout."""

    def __post_init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=1024)
        self._begin(0)

    def _begin(self, sequences: int) -> None:
        self._sequences = sequences  # that began together; 0 where some came later, or left and may come back
        self._ended = 0  # of those
        self._longest = 0
        self._plain_rounds = 0
        self._drafted_rounds = 0
        self._accepted = 0.0  # draft tokens of a mean sequence

    def running(self, batch: int, before: int, served: bool) -> None:
        """A round of so many sequences is coming, after one of `before`. `served`: requests wait or keep coming."""
        left = self._sequences - self._ended
        if batch > 2 * before or (self._sequences and not left):
            self._measure_gain()
            self._begin(batch)
        elif self._sequences and batch > before and not self._ended:  # they are still being taken in
            self._sequences = batch
        elif batch > before or batch < left or (served and self._ended):
            self._sequences = 0

    def _measure_gain(self) -> None:
        """Of sequences that began together, the one that ended last took part in every round. Its first token came with
        its prompt."""
        complete = self._sequences > 0 and self._ended == self._sequences
        if complete and self._drafted_rounds >= ENOUGH and self._accepted > 0:
            accepted = self._longest - 1 - self._plain_rounds - self._drafted_rounds
            self.gain = min(1.0, max(0.0, accepted / self._accepted))

    def observe(self, accepted: Sequence[int] | None, ended: Sequence[int]) -> None:
        """A round: accepted draft tokens per sequence, None for plain decoding, and lengths of what ended with it."""
        if accepted:
            self._drafted_rounds += 1
            self._accepted += fmean(accepted)
        else:
            self._plain_rounds += 1
        self._lengths.extend(ended)
        self._ended += len(ended)
        self._longest = max([self._longest, *ended])

    def see(self, size: int, ratio: float) -> None:
        """After a drafted round. A ratio is given the benefit of what is not known yet, so it falls at once and rises
        slowly: a few drafts for new sequences must not outweigh what was known."""
        known = self.ratios.get(size, 1.0)
        self.ratios[size] = ratio if ratio < known else known + (ratio - known) / HORIZON

    def start_over(self) -> None:
        """Most sequences are new. What is known of stragglers is forgotten slowly, because plain decoding, to which it
        may lead, cannot correct it."""
        self.ratios = {size: ratio + (1 - ratio) / HORIZON for size, ratio in self.ratios.items()}
        self.gain += (1 - self.gain) / HORIZON
        if self._lengths:
            self.together = median(self._lengths) / max(self._lengths)
        self._lengths.clear()

    def waited_for(self, size: int, rate: float, depth: int, accept_length: float) -> float:
        """Share of the slowest sequence's tokens that are left when the average sequence has ended. `rate` and
        `accept_length` are the average one's."""
        slow = min(0.999, rate * self.ratios.get(size, 1.0))
        slow_length = min((1 - slow ** (depth + 1)) / (1 - slow), 1 + self.gain * (accept_length - 1))
        return self.together * max(0.0, 1 - slow_length / accept_length)

    def state(self) -> dict[str, Any]:
        ratios = [{"batch": size, "ratio": ratio} for size, ratio in sorted(self.ratios.items())]
        return {"together": self.together, "gain": self.gain, "ratios": ratios}

    def restore(self, state: Mapping[str, Any], sizes: Iterable[int]) -> None:
        self.together = state.get("together", 1.0)
        self.gain = state.get("gain", 1.0)
        self.ratios = {entry["batch"]: entry["ratio"] for entry in state.get("ratios", []) if entry["batch"] in sizes}
