"""A simulated worker: it decodes its requests together, each round as long as its batch takes.

Within a batch every sequence gains tokens at the same rate, one in `curve.at(batch)` seconds, so that nothing happens
until the one with the fewest tokens left ends: the simulation jumps from end to end.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean

from paceline.simulate.costs import BatchCurve


@dataclass(frozen=True)
class SimRequest:
    """What is left to decode of a request."""

    id: int
    tokens: float
    first_s: float
    """Before its first token: prefill, and verifying what was written ahead of it."""


class SimWorker:
    def __init__(self, requests: Mapping[int, SimRequest], curve: BatchCurve, slots: int):
        """`requests` are all of the rollout, of which it is assigned some; at most `slots` decode together."""
        self.requests = requests
        self.curve = curve
        self.slots = slots
        self.now = 0.0
        self.waiting: deque[int] = deque()
        self._progress = 0.0  # tokens that a sequence would have that has run from the beginning
        self._running: list[tuple[float, int]] = []  # a heap of (progress at which it ends, request)
        self._began: dict[int, float] = {}  # progress at which a request had no token yet

    @property
    def batch(self) -> int:
        return len(self._running)

    @property
    def next_end(self) -> float:
        """When the next sequence ends; never, if none runs."""
        if not self._running:
            return inf
        return self.now + (self._running[0][0] - self._progress) * self.curve.at(self.batch)

    def assign(self, requests: Iterable[int], now: float) -> None:
        self.run_until(now)
        self.waiting.extend(requests)
        self._admit()

    def run_until(self, now: float) -> None:
        """Decode until then. A worker that is still prefilling is ahead of the clock."""
        if now <= self.now:
            return
        if self._running:
            self._progress += (now - self.now) / self.curve.at(self.batch)
        self.now = now

    def finish_next(self) -> tuple[int, float]:
        """Decode until the next sequence ends -> its request, and when that was."""
        self.run_until(self.next_end)
        end, request = heapq.heappop(self._running)
        self._progress = end  # without the rounding of the sums
        ended = self.now
        self._admit()
        return request, ended

    def release(self, count: int) -> list[int]:
        """Give up to so many requests that have not begun, the last ones first."""
        return [self.waiting.pop() for _ in range(min(count, len(self.waiting)))]

    @property
    def written(self) -> float:
        """Mean tokens of the running sequences so far."""
        return fmean(self._progress - self._began[request] for _, request in self._running)

    def give(self, count: int) -> list[tuple[int, float]]:
        """Give so many of the running sequences, of those that were admitted last -> the requests, and the tokens that
        are left of each."""
        given = sorted(self._running, key=lambda one: one[1])[len(self._running) - count :]
        self._running = [one for one in self._running if one not in given]
        heapq.heapify(self._running)
        return [(request, end - self._progress) for end, request in given]

    def take(self, given: Iterable[tuple[int, float]], now: float, seconds: float) -> None:
        """Go on with another worker's sequences, after so many seconds of computing their prefixes."""
        self.run_until(now)
        for request, left in given:
            heapq.heappush(self._running, (self._progress + left, request))
            self._began[request] = self._progress + left - self.requests[request].tokens
        self.now = max(self.now, now) + seconds

    def _admit(self) -> None:
        """While some are prefilled, nobody decodes."""
        while self.waiting and self.batch < self.slots:
            request = self.requests[self.waiting.popleft()]
            self.now += request.first_s
            heapq.heappush(self._running, (self._progress + request.tokens, request.id))
            self._began[request.id] = self._progress
