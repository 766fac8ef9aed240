"""How much of a round goes into its draft; the rest goes into verifying it."""

from __future__ import annotations

import time

import torch

from paceline.draft.strategy import Strategy

EVERY = 8  # rounds of a strategy on a GPU, of which one is timed: reading the device's clock takes time
SHARE = 0.3  # of a round that drafting is taken to be before one was timed


class DraftTimer:
    """`begin`, draft, `drafted`, verify, and ask for the `seconds` of drafting once the output has been read. Rounds
    that are not begun here are taken to have the same share of drafting as those that were."""

    def __init__(self, device: torch.device):
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._rounds: dict[Strategy, int] = {}
        self._share: dict[Strategy, float] = {}
        self._started = self._seconds = 0.0
        self._timed = False

    def begin(self, strategy: Strategy) -> bool:
        """-> whether this round is timed."""
        rounds = self._rounds.get(strategy, 0)
        self._rounds[strategy] = rounds + 1
        self._timed = not self._events or rounds % EVERY == 0
        self._started = time.perf_counter()
        if self._timed and self._events:
            self._events[0].record()
        return self._timed

    def drafted(self) -> None:
        self._seconds = time.perf_counter() - self._started
        if self._timed and self._events:
            self._events[1].record()

    def seconds(self, strategy: Strategy, whole: float, timed: bool) -> float:
        """Of the `whole` round that is over."""
        if not timed:
            return self._share.get(strategy, SHARE) * whole
        if self._events:  # the host only hands out work; how long that takes says nothing
            self._seconds = self._events[0].elapsed_time(self._events[1]) / 1e3
        seconds = min(self._seconds, whole)
        self._share[strategy] = seconds / whole
        return seconds
