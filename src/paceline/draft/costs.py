"""What rounds cost: seconds by strategy and batch size, measured where there were such rounds and guessed elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from paceline.draft.acceptance import ENOUGH, HORIZON
from paceline.draft.decision import Choice
from paceline.draft.strategy import PLAIN, Strategy


class Cost:
    """Seconds of a strategy's latest rounds at a batch size. Their median outvotes a few slow ones."""

    def __init__(self, seconds: Iterable[float] = (), round: int = 0):
        self.seconds = deque(seconds, maxlen=ENOUGH)
        self.round = round
        self.first = False
        """Whether all there is was measured in the first round after others (`Choice.first`)."""
        self.median = median(self.seconds) if self.seconds else 0.0

    def add(self, seconds: float, round: int, first: bool = False) -> None:
        if first and self.seconds and not self.first:
            return
        if self.first and not first:
            self.seconds.clear()
        self.first = first
        if round - self.round > HORIZON:  # contexts were shorter or longer then
            self.seconds = deque(list(self.seconds)[-1:], maxlen=ENOUGH)
        self.seconds.append(seconds)
        self.round = round
        self.median = median(self.seconds)


class CostTable:
    def __init__(self, strategies: Sequence[Strategy]):
        self.strategies = strategies
        self.costs: dict[Strategy, dict[int, Cost]] = {s: {} for s in strategies}
        self._guesses: dict[tuple[int, Strategy], float] = {}  # until one more is measured
        self._catch_ups: dict[tuple[str, int], deque[float]] = {}  # seconds per row, by drafter and batch size

    @property
    def plain(self) -> dict[int, Cost]:
        """Of plain decoding, by batch size."""
        return self.costs[PLAIN]

    def round_s(self, size: int, strategy: Strategy) -> float:
        """Seconds of a round. Plain decoding must have been measured at this size."""
        known = self.costs[strategy].get(size)
        if known:
            return known.median
        key = (size, strategy)
        if key not in self._guesses:
            self._guesses[key] = self._guess(size, strategy)
        return self._guesses[key]

    def catch_up_s(self, size: int, drafter: str, rows: int) -> float:
        """Seconds of passes of so many rows; none until they were measured."""
        known = self._catch_ups.get((drafter, size))
        return rows * median(known) if known and rows else 0.0

    def alone_s(self, size: int) -> float:
        """Seconds per token of a sequence that decodes alone, or with as few as were seen."""
        least = min(self.plain)
        return self.plain[min(least, size)].median

    def _guess(self, size: int, strategy: Strategy) -> float:
        """The lower one of two guesses, because a round is enough to correct it: what the strategy takes over plain
        decoding at the nearest measured size, and what a strategy of the same drafter takes beyond plain decoding at
        this one, times the ratio of their work. Where nothing is known it takes as long as plain decoding."""
        ratios = []
        near = min((n for n in self.costs[strategy] if n in self.plain), key=lambda n: abs(n - size), default=None)
        if near is not None:
            ratios.append(self.costs[strategy][near].median / self.plain[near].median)
        alike = [s for s in self.strategies if s.drafter == strategy.drafter and size in self.costs[s]]
        other = min(alike, key=lambda s: abs(_work(s) - _work(strategy)), default=None)
        if other is not None:
            beyond = self.costs[other][size].median / self.plain[size].median - 1
            ratios.append(1 + max(0.0, beyond) * _work(strategy) / _work(other))
        return self.plain[size].median * min(ratios, default=1.0)

    def observe(self, size: int, choice: Choice, seconds: float, catch_up_rows: int, round: int) -> None:
        strategy = choice.strategy
        if not catch_up_rows:
            if size not in self.costs[strategy]:
                self.costs[strategy][size] = Cost()
                self._guesses.clear()
            self.costs[strategy][size].add(seconds, round, choice.first)
        elif size in self.plain:
            beyond = max(0.0, seconds - self.round_s(size, strategy))
            known = self._catch_ups.setdefault((strategy.drafter, size), deque(maxlen=ENOUGH))
            known.append(beyond / catch_up_rows)

    def state(self) -> dict[str, Any]:
        return {
            "costs": [
                {"strategy": str(s), "batch": n, "round": cost.round, "seconds": list(cost.seconds)}
                for s, by_size in self.costs.items()
                for n, cost in sorted(by_size.items())
            ],
            "catch_ups": [
                {"drafter": drafter, "batch": n, "seconds": list(seconds)}
                for (drafter, n), seconds in self._catch_ups.items()
            ],
        }

    def restore(self, state: Mapping[str, Any], sizes: Sequence[int]) -> None:
        for entry in state["costs"]:
            strategy = Strategy.parse(entry["strategy"])
            if strategy in self.costs and entry["batch"] in sizes:
                cost = Cost(entry["seconds"], entry["round"])
                if cost.median > 0:
                    self.costs[strategy][entry["batch"]] = cost
        for entry in state.get("catch_ups", []):
            self._catch_ups[entry["drafter"], entry["batch"]] = deque(entry["seconds"], maxlen=ENOUGH)


def _work(strategy: Strategy) -> int:
    """What a round does beyond plain decoding, roughly: draft tokens to verify and passes to draft them."""
    return (strategy.shared or strategy.nodes) + strategy.depth
