"""Which strategy a round should use: the one with the most tokens per second, from measured costs and acceptance.

A strategy's speed is its expected accept length (`draft.acceptance`) over the median duration of its latest rounds at
this batch size, plus its share of the passes in which its drafter has to catch up. A cost that was not measured at a
batch size is guessed from the nearest size at which it was and from other strategies of the same drafter. A drafted
strategy runs if it is faster than plain decoding by a margin. A small share of the time, `explore`, goes to trials of
others; fruitless trials at a batch size become rarer until its best strategy changes.

Under known noise a decision may depend on anything, the draft at hand included: whatever is verified, the same tokens
are written. Today it depends on past rounds and on the batch alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from statistics import median
from typing import Any

from paceline.draft.acceptance import Acceptance
from paceline.draft.ladder import batch_ladder, bucket
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.tuner_state import renamed

MARGIN = 0.85  # a drafted strategy's speed is multiplied by this: sequences drift apart and the slowest is waited for
KEPT = 9  # durations of which the median is a cost: enough to outvote a few slow rounds, few enough to follow context
HORIZON = 32  # rounds in which a catch-up must pay, after which a duration is old, and between the first two trials
BACKOFF = 4  # growth of the wait after a fruitless trial: all of them together cost under 1 % where nothing pays


@dataclass(frozen=True)
class BatchContext:
    """What the engine knows before a round."""

    batch: int
    """Running sequences."""
    tokens_left: float = inf
    """Mean tokens until the sequences' length limits."""
    catch_up_rows: Mapping[str, int] = field(default_factory=dict)
    """By drafter: rows of the passes that it has to make first because it did not run."""


@dataclass(frozen=True)
class Choice:
    strategy: Strategy
    trial: bool = False
    """Chosen to learn about it, not because it is the best known."""


@dataclass(frozen=True)
class RoundOutcome:
    """What a round took and gave."""

    choice: Choice
    batch: int
    seconds: float
    accepted: Sequence[int] | None
    """Accepted draft tokens per sequence; None for plain decoding."""
    captured: bool = False
    """Whether a CUDA graph was captured in it, so that its duration tells nothing about the next one's."""
    catch_up_rows: int = 0
    """Rows of the passes that its drafter made first."""


class Cost:
    """Seconds of a strategy's latest rounds at a batch size."""

    def __init__(self, seconds: Iterable[float] = (), round: int = 0):
        self.seconds = deque(seconds, maxlen=KEPT)
        self.round = round
        self.median = median(self.seconds) if self.seconds else 0.0

    def add(self, seconds: float, round: int) -> None:
        if round - self.round > HORIZON:  # contexts were shorter or longer then
            self.seconds = deque(list(self.seconds)[-1:], maxlen=KEPT)
        self.seconds.append(seconds)
        self.round = round
        self.median = median(self.seconds)


@dataclass
class Trials:
    """When a family of strategies may have its next trial."""

    due: int = 0
    """The round from which on it may."""
    wait: int = HORIZON
    """Rounds from that trial to the one after; grows by `BACKOFF` with every trial until one is fruitful."""


class Tuner:
    def __init__(self, strategies: list[Strategy], max_batch: int, explore: float = 0.02):
        self.strategies = [PLAIN, *(s for s in strategies if not s.plain)]
        self.explore = explore
        self.round = 0
        self.total_s = 0.0
        self.explored_s = 0.0
        self._ladder = batch_ladder(max_batch)
        self._batch = 0  # of the last round
        self._costs: dict[Strategy, dict[int, Cost]] = {s: {} for s in self.strategies}
        self._guesses: dict[tuple[int, Strategy], float] = {}  # costs that were not measured, until one more is
        self._acceptance = {s.family: Acceptance() for s in self.strategies}
        self._catch_ups: dict[tuple[str, int], deque[float]] = {}  # seconds per row, by drafter and batch size
        self._trials = {s.family: Trials() for s in self.strategies}
        self._tried: str | None = None  # family whose trial was observed since the last decision
        self._best = PLAIN  # of the last decision

    def choose(self, context: BatchContext) -> Choice:
        """The strategy of the next round. The outcomes of earlier rounds may be observed later."""
        self.round += 1
        if context.batch > 2 * self._batch:  # more than half of the sequences are new
            for acceptance in self._acceptance.values():
                acceptance.start_over()
        self._batch = context.batch
        size = bucket(self._ladder, context.batch)
        if len(self.strategies) == 1 or size not in self._costs[PLAIN]:
            return Choice(PLAIN)
        speeds = {s: self._speed(size, s, context) for s in self.strategies if s.fits(context.batch)}
        best = max(speeds, key=speeds.__getitem__)
        if best.family == self._tried != self._best.family:
            # A fruitful trial: its drafter is good again, so all its families may have one.
            self._trials |= {s.family: Trials(self.round) for s in self.strategies if s.drafter == best.drafter}
        self._tried = None
        self._best = best
        tried = self._due(speeds, best)
        return Choice(best) if tried is None else Choice(tried, trial=True)

    def _speed(self, size: int, strategy: Strategy, context: BatchContext) -> float:
        """Tokens per second and sequence, less the margin."""
        seconds = self._cost(size, strategy)
        if strategy.plain:
            return 1.0 / seconds
        tokens = self._acceptance[strategy.family].accept_length(strategy.depth, context.batch == 1)
        rows = context.catch_up_rows.get(strategy.drafter, 0)
        if rows and (strategy.drafter, size) in self._catch_ups:  # free until it was measured
            rounds = max(1.0, min(HORIZON, context.tokens_left / tokens))
            seconds += rows * median(self._catch_ups[strategy.drafter, size]) / rounds
        return MARGIN * tokens / seconds

    def _due(self, speeds: Mapping[Strategy, float], best: Strategy) -> Strategy | None:
        """The fastest strategy of those whose family may have a trial, within the share of time for trials."""
        if self.explored_s >= self.explore * self.total_s:
            return None
        due = (s for s in speeds if s != best and self._trials[s.family].due <= self.round)
        tried = max(due, key=speeds.__getitem__, default=None)
        if tried is not None:
            trials = self._trials[tried.family]
            trials.due = self.round + trials.wait
            trials.wait *= BACKOFF
        return tried

    def _cost(self, size: int, strategy: Strategy) -> float:
        """Seconds of a round: measured, or guessed."""
        known = self._costs[strategy].get(size)
        if known:
            return known.median
        key = (size, strategy)
        if key not in self._guesses:
            self._guesses[key] = self._guess(size, strategy)
        return self._guesses[key]

    def _guess(self, size: int, strategy: Strategy) -> float:
        """The lower one of two guesses, because a round is enough to correct it: what the strategy takes over plain
        decoding at the nearest measured size, and what a strategy of the same drafter takes beyond plain decoding at
        this one, times the ratio of their work. Where nothing is known it takes as long as plain decoding."""
        plain = self._costs[PLAIN]
        ratios = []
        near = min((n for n in self._costs[strategy] if n in plain), key=lambda n: abs(n - size), default=None)
        if near is not None:
            ratios.append(self._costs[strategy][near].median / plain[near].median)
        alike = [s for s in self.strategies if s.drafter == strategy.drafter and size in self._costs[s]]
        other = min(alike, key=lambda s: abs(_work(s) - _work(strategy)), default=None)
        if other is not None:
            beyond = self._costs[other][size].median / plain[size].median - 1
            ratios.append(1 + max(0.0, beyond) * _work(strategy) / _work(other))
        return plain[size].median * min(ratios, default=1.0)

    def observe(self, outcome: RoundOutcome) -> None:
        """Rounds may have been chosen by somebody else; strategies that are not the tuner's own are ignored."""
        strategy = outcome.choice.strategy
        if strategy not in self._costs:
            return
        self.total_s += outcome.seconds
        if outcome.choice.trial:
            self.explored_s += outcome.seconds
            self._tried = strategy.family
        if outcome.accepted is not None:
            self._acceptance[strategy.family].observe(self.round, strategy.depth, outcome.accepted)
        size = bucket(self._ladder, outcome.batch)
        if outcome.captured:
            return
        if not outcome.catch_up_rows:
            if size not in self._costs[strategy]:
                self._costs[strategy][size] = Cost()
                self._guesses.clear()
            self._costs[strategy][size].add(outcome.seconds, self.round)
        elif size in self._costs[PLAIN]:
            seconds = max(0.0, outcome.seconds - self._cost(size, strategy))
            known = self._catch_ups.setdefault((strategy.drafter, size), deque(maxlen=KEPT))
            known.append(seconds / outcome.catch_up_rows)

    def renew(self) -> None:
        """A drafter has changed: every family may have a trial at once."""
        for trials in self._trials.values():
            trials.due = self.round

    def state(self) -> dict[str, Any]:
        """All that it knows, as JSON."""
        return {
            "round": self.round,
            "seconds": self.total_s,
            "explored": self.explored_s,
            "costs": [
                {"strategy": str(s), "batch": n, "round": cost.round, "seconds": list(cost.seconds)}
                for s, by_size in self._costs.items()
                for n, cost in sorted(by_size.items())
            ],
            "catch_ups": [
                {"drafter": drafter, "batch": n, "seconds": list(seconds)}
                for (drafter, n), seconds in self._catch_ups.items()
            ],
            "acceptance": {family: asdict(a) for family, a in self._acceptance.items()},
            "trials": {family: asdict(t) for family, t in self._trials.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what an earlier tuner knew about strategies and batch sizes that still exist."""
        self.round = state["round"]
        self.total_s = state["seconds"]
        self.explored_s = state["explored"]
        for entry in state["costs"]:
            strategy = Strategy.parse(entry["strategy"])
            if strategy in self._costs and entry["batch"] in self._ladder:
                cost = Cost(entry["seconds"], entry["round"])
                if cost.median > 0:
                    self._costs[strategy][entry["batch"]] = cost
        for entry in state.get("catch_ups", []):
            self._catch_ups[entry["drafter"], entry["batch"]] = deque(entry["seconds"], maxlen=KEPT)
        for family, entry in state["acceptance"].items():
            if family in self._acceptance:
                self._acceptance[family] = Acceptance(**renamed(entry))
        for family, entry in state.get("trials", {}).items():
            if family in self._trials:
                self._trials[family] = Trials(**entry)


def _work(strategy: Strategy) -> int:
    """What a round does beyond plain decoding, roughly: draft tokens to verify and passes to draft them."""
    return strategy.nodes + strategy.depth
