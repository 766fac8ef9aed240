"""Which strategy pays most right now: tokens per second, from measured costs and tracked acceptance.

For each bucket of batch sizes and each strategy the tuner keeps the latest durations of a round; for each family of
strategies it keeps how often a guess at each depth held, with old observations fading by the round, tried or not. The
product is an estimate of speed for every strategy, and the best one runs. What has not been measured at a batch size is
guessed from what it cost at the nearest size and from what others cost at this one, so that a few bad tries are enough
to know that none pays. A drafter that did not run has to catch up first, which is measured too, and has to pay before
texts come to their longest. When most texts are new, what is usual counts, not what the last few of those before did.
Of many texts that end together the slow ones are waited for, so what guesses give those counts, once that is known.
Where guessing pays little, plain decoding is measured again and again. A small share of the time, at most `explore`,
goes to strategies that have not been tried for long, so that no verdict is for ever. Decisions are a function of the
past alone: a draft is never looked at before deciding whether to check it, which would change what is written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from statistics import median
from typing import Any

from paceline.draft.acceptance import Acceptance
from paceline.draft.crowd import FEW, MARGIN, Crowd
from paceline.draft.strategy import PLAIN, Strategy

LATEST = 9  # durations that are kept; their median counts
PATIENCE = 25  # rounds before a strategy is worth another look
SELDOM = 16  # times as many before one that cannot win is
CHEAP = 3  # plain rounds that a look may take where there is time for it at all; one that takes more counts for more
SETTLED = 5  # looks in vain after which more of them may take less and less
HOLD = 3  # rounds for which a decision stands after the one it was made for
HORIZON = 50  # rounds over which it must pay that a drafter has to catch up
LASTING = 100  # rounds over which it must pay that a strategy meets a batch size for the first time
UNKNOWN_SHARE = 0.25  # 0: a plain round takes as long for one text as for many; 1: it takes as much less
DOUBTFUL = 1.3  # a lead over plain decoding that may be an error
MANY = 2  # times as many texts as in the round before: most of them are new
REFRESH = 16  # rounds for which a duration of plain decoding is believed where the lead is doubtful


class Cost:
    """Durations of a strategy at a batch size."""

    def __init__(self, seconds: Iterable[float] = (), round: int = -1):
        self.seconds = deque(seconds, maxlen=LATEST)
        self.round = round
        self.typical = median(self.seconds) if self.seconds else 0.0

    def add(self, seconds: float, round: int) -> None:
        if round - self.round > PATIENCE:  # texts were shorter or longer then: what is new counts more
            self.seconds = deque(list(self.seconds)[-1:], maxlen=LATEST)
        self.seconds.append(seconds)
        self.round, self.typical = round, median(self.seconds)

    @property
    def sure(self) -> bool:
        """One or two durations may be accidents."""
        return len(self.seconds) >= 3


@dataclass(frozen=True)
class Prospect:
    """What lies ahead of a decision, as far as the engine knows."""

    left: float = inf
    """Tokens that the texts have left to their longest, on average: no round writes more."""
    missed: Mapping[str, int] = field(default_factory=dict)
    """Rows of the passes that each drafter has to make before its next guess, because it did not run."""
    rates: Sequence[float] | None = None
    """How often guesses hold for each of the texts, the most seldom first (`draft.pace`), if it is known."""
    more: bool = False
    """Whether other texts wait for a place: then no one text is waited for."""


@dataclass
class Decision:
    size: int  # the bucket that it was made for
    strategy: Strategy
    rounds: int = 0
    """For how many rounds more it stands: deciding takes time too. What is being tried is not held on to."""
    exploring: bool = False


class Tuner:
    def __init__(
        self,
        strategies: list[Strategy],
        max_batch: int,
        explore: float = 0.02,
        prospect: Callable[[], Prospect] = Prospect,
    ):
        self.strategies = [PLAIN, *(s for s in strategies if not s.plain)]
        self.explore = explore
        self.sizes = sizes(max_batch)
        self.round = 0
        self.seconds = 0.0
        self.explored = 0.0
        self.allowed = 0.0
        """Seconds that exploring may have taken until now."""
        self._costs: dict[Strategy, dict[int, Cost]] = {s: {} for s in self.strategies}
        self._acceptance: dict[str, Acceptance] = {s.family: Acceptance() for s in self.strategies}
        self._catching_up: dict[str, dict[int, deque[float]]] = {}  # seconds a row, by drafter and bucket
        self._met: set[tuple[int, Strategy]] = set()  # buckets and strategies that ran together before
        self._meeting: deque[float] = deque(maxlen=LATEST)  # seconds that captures took
        self._ask, self._prospect = prospect, Prospect()
        self._looks = 0
        self._best: dict[int, Strategy] = {}  # by bucket, as it was last seen
        self._in_vain: dict[int, float] = {}  # looks at a bucket since its best strategy was another one
        self._crowd = Crowd()
        self._running = 0
        self._now = Decision(0, PLAIN)
        self._next: Decision | None = None

    def bucket(self, batch: int) -> int:
        return self.sizes[min(bisect_left(self.sizes, batch), len(self.sizes) - 1)]

    def choose(self, batch: int) -> Strategy:
        """The strategy for a round with `batch` texts."""
        self.round += 1
        if batch >= MANY * self._running:
            for acceptance in self._acceptance.values():
                acceptance.start_over()
            self._crowd.start_over()
        self._running = batch
        size = self.bucket(batch)
        if self._now.size == size and self._now.rounds > 0:
            self._now.rounds -= 1
        elif self._next is not None and self._next.size == size:
            self._now, self._next = self._next, None
        else:
            self._now = self._decide(size)
        return self._now.strategy

    @property
    def exploring(self) -> bool:
        """Whether the strategy that was chosen last is only being looked at."""
        return self._now.exploring

    def think(self, batch: int) -> None:
        """Decide about the next round ahead of time, while the device is busy with this one."""
        if self._now.rounds == 0:
            self._next = self._decide(self.bucket(batch))

    def _decide(self, size: int) -> Decision:
        if len(self.strategies) == 1 or not self._costs[PLAIN]:
            return Decision(size, PLAIN)  # what all others are compared with
        self._prospect = self._ask()
        fitting = [s for s in self.strategies if s.fits(size)]
        worth = self._worth(size)
        best = max(fitting, key=lambda s: self._speed(size, s) * (1.0 if s.plain else worth(s.depth)))
        if self._best.get(size) != best:
            self._best[size], self._in_vain[size] = best, 0.0
        if not best.plain and self._in_doubt(size, best):
            return Decision(size, PLAIN)
        if not self._sure(size, best):
            return Decision(size, best)
        # First things first: others are looked at once the best is known.
        other = self._worth_a_look(size, best, fitting)
        return Decision(size, best, HOLD) if other is None else Decision(size, other, exploring=True)

    def observe(
        self,
        batch: int,
        strategy: Strategy,
        seconds: float,
        accepted: list[int] | None,
        warm: bool,
        made_up: int = 0,
        exploring: bool = False,
    ) -> None:
        """What a round took, and how many guesses held for each text. A strategy that is not the tuner's own, because
        somebody else chose, is ignored; `exploring` is what the tuner said of it when it chose. The duration of a round
        that was not `warm` (a graph was captured, a drafter caught up) says nothing about the next one; if a drafter
        made up for what it had missed in `made_up` rows, and that was all, it says what those cost."""
        if strategy not in self._costs:
            return
        size = self.bucket(batch)
        self.seconds += seconds
        self.allowed += seconds * self.explore * min(1.0, SETTLED / (1 + self._in_vain.get(size, 0)))
        if exploring:
            self.explored += seconds  # with what a graph took to capture: most looks find nothing that it would serve
        if warm:
            self._costs[strategy].setdefault(size, Cost()).add(seconds, self.round)
        elif not strategy.plain:
            self._took_longer(size, strategy, max(0.0, seconds - self._cost(size, strategy)), made_up)
        self._met.add((size, strategy))
        if accepted is not None:
            self._acceptance[strategy.family].observe(self.round, strategy.depth, accepted)

    def _took_longer(self, size: int, strategy: Strategy, more: float, made_up: int) -> None:
        """By so many seconds than a round of its kind will take."""
        if made_up:
            known = self._catching_up.setdefault(strategy.drafter, {})
            known.setdefault(size, deque(maxlen=LATEST)).append(more / made_up)
        elif (size, strategy) not in self._met:
            self._meeting.append(more)

    def ended(self, lengths: Iterable[int]) -> None:
        """Texts have ended with so many tokens."""
        self._crowd.ended(lengths)

    def renew(self) -> None:
        """A drafter has changed, so old looks at its strategies say little: what they took too much is forgiven."""
        self._in_vain = dict.fromkeys(self._in_vain, 0.0)
        self.explored = min(self.explored, self.allowed)

    def _worth(self, size: int) -> Callable[[int], float]:
        """By how deep guesses are: what they are worth of the tokens per second that they promise."""
        if size <= FEW or self._prospect.more:
            return lambda depth: MARGIN
        if self._prospect.rates:
            self._crowd.see(size, self._prospect.rates)
        return self._crowd.worth(size, {n: self._share(n, size) for n in self.sizes if n < size})

    def _share(self, few: int, size: int) -> float:
        """What a plain round of a few texts takes, over one of a whole bucket; if that was not measured, between what
        it is on a GPU, where reading the weights is most of it, and on a CPU, where computing is."""
        if few not in self._costs[PLAIN]:
            return (few / size) ** UNKNOWN_SHARE
        return min(1.0, self._costs[PLAIN][few].typical / self._cost(size, PLAIN))

    def _in_doubt(self, size: int, best: Strategy) -> bool:
        """Whether what plain decoding takes is not known, or not well known where guessing pays so little that it may
        not pay at all. To find out costs next to nothing: a plain round or two."""
        if size not in self._costs[PLAIN]:
            return True
        if self._speed(size, best) > DOUBTFUL * self._speed(size, PLAIN):
            return False
        return not self._sure(size, PLAIN) or self.round - self._costs[PLAIN][size].round > REFRESH

    def _sure(self, size: int, strategy: Strategy) -> bool:
        known = self._costs[strategy].get(size)
        return known is not None and known.sure

    def _cost(self, size: int, strategy: Strategy) -> float:
        """Seconds of a round: measured, or guessed from the nearest size that was."""
        known = self._costs[strategy].get(size)
        if known and (strategy.plain or len(known.seconds) > 1):
            return known.typical
        guess = self._guess(size, strategy)
        return (known.typical + guess) / 2 if known else guess  # one duration may be an accident

    def _guess(self, size: int, strategy: Strategy) -> float:
        """What a round should take, judging by other sizes and by other strategies at this one."""
        near = self._nearest(size, strategy)
        if strategy.plain:
            # Between reading the weights once for all and computing each text on its own.
            return near[1] * (size / near[0]) ** 0.5 if near else 1.0
        other = self._alike(size, strategy)
        if other is not None and near is not None and near[0] in self._costs[other]:
            # What it took beyond plain decoding there has grown as it did for the other one.
            extra = self._extra(near[0], strategy) * self._extra(size, other) / self._extra(near[0], other)
        elif other is not None:
            extra = self._extra(size, other) * _work(strategy) / _work(other)
        elif near is not None:
            # Checking many guesses for few texts costs relatively less.
            extra = self._extra(near[0], strategy) * min(1.0, size / near[0])
        else:
            extra = 0.1 * _work(strategy)
        return self._cost(size, PLAIN) * (1 + extra)

    def _extra(self, size: int, strategy: Strategy) -> float:
        """What a round took beyond a plain one, in plain ones; never nothing, because it is divided by."""
        return max(0.05, self._costs[strategy][size].typical / self._cost(size, PLAIN) - 1)

    def _alike(self, size: int, strategy: Strategy) -> Strategy | None:
        """Of the same drafter's strategies measured at this size, the one whose work is most like this one's."""
        alike = (s for s in self.strategies if s.drafter == strategy.drafter and s != strategy)
        known = [s for s in alike if size in self._costs[s]]
        return min(known, key=lambda s: abs(_work(s) - _work(strategy)), default=None)

    def _nearest(self, size: int, strategy: Strategy) -> tuple[int, float] | None:
        """The other size nearest to this one at which the strategy was measured, and what it took there."""
        known = [(n, c.typical) for n, c in self._costs[strategy].items() if n != size]
        return min(known, key=lambda pair: abs(pair[0] - size), default=None)

    def _speed(self, size: int, strategy: Strategy, tokens: float | None = None) -> float:
        """Tokens per second that a text can expect, until it ends or the decision is old."""
        tokens = min(self.tokens(strategy) if tokens is None else tokens, max(1.0, self._prospect.left))
        rounds = min(HORIZON, max(1.0, self._prospect.left / tokens))
        graphs = self._graphs(size, strategy)
        if graphs and not any((size, s) in self._met for s in self.strategies[1:]):
            graphs = 0.0  # those of the first one that guesses at a size pay for long
        return tokens / (self._cost(size, strategy) + self._entry(size, strategy) / rounds + graphs / LASTING)

    def _graphs(self, size: int, strategy: Strategy) -> float:
        """Seconds for its graphs, if it never ran at this size."""
        return median(self._meeting) if self._meeting and (size, strategy) not in self._met else 0.0

    def _entry(self, size: int, strategy: Strategy) -> float:
        """Seconds before its first round, for what its drafter has missed."""
        known, missed = self._catching_up.get(strategy.drafter), self._prospect.missed.get(strategy.drafter, 0)
        if not known or not missed:
            return 0.0
        near = min(known, key=lambda n: abs(n - size))
        # A pass for more texts takes somewhat longer, but a row of it less: as what plain decoding is guessed to take.
        return missed * median(known[near]) * (near / size) ** 0.5

    def tokens(self, strategy: Strategy) -> float:
        return self._acceptance[strategy.family].tokens(strategy.depth)

    def _worth_a_look(self, size: int, best: Strategy, fitting: list[Strategy]) -> Strategy | None:
        """Of those not tried for a while at this size, the one that was fastest in its best time; every second look
        goes to the one that has waited longest, so that what was never good gets its chance too. What costs much more
        than a plain round, such as graphs to capture, has to wait until the budget has time for it."""

        def age(s: Strategy) -> int:
            known = self._costs[s].get(size)
            return self.round - known.round if known else self.round

        left = self.allowed - self.explored
        if left <= 0:
            return None
        most = left + CHEAP * self._cost(size, PLAIN)

        def due(s: Strategy) -> bool:
            # Where even perfect guesses would lose, only what a round costs could change the verdict.
            hopeless = self._speed(size, s, 1 + s.depth) < self._speed(size, best)
            return age(s) >= PATIENCE * (SELDOM if hopeless else 1)

        def price(s: Strategy) -> float:
            return self._cost(size, s) + self._entry(size, s) + self._graphs(size, s)

        waiting = [s for s in fitting if s != best and due(s)]
        if self._looks % 2:
            # Nothing else is looked at while there is too little time for it: what costs little would use it all up.
            found = max(waiting, key=age, default=None)
            found = found if found and price(found) <= most else None
        else:
            affordable = [s for s in waiting if price(s) <= most]
            hope = lambda s: self._acceptance[s.family].hope(s.depth) / self._cost(size, s)  # noqa: E731
            found = max(affordable, key=hope, default=None)
        if found:
            self._in_vain[size] += max(1.0, price(found) / (CHEAP * self._cost(size, PLAIN)))
            self._looks += 1
        return found

    def state(self) -> dict[str, Any]:
        """All that it knows, as JSON."""
        return {
            "round": self.round,
            "seconds": self.seconds,
            "explored": self.explored,
            "allowed": self.allowed,
            "costs": [
                {"strategy": str(s), "batch": n, "round": c.round, "seconds": list(c.seconds)}
                for s, by_size in self._costs.items()
                for n, c in sorted(by_size.items())
            ],
            "catch_ups": [
                {"drafter": drafter, "batch": n, "seconds": list(each)}
                for drafter, by_size in self._catching_up.items()
                for n, each in sorted(by_size.items())
            ],
            "crowd": self._crowd.state(),
            "acceptance": {family: asdict(a) for family, a in self._acceptance.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what an earlier tuner knew about strategies that still exist."""
        self.round, self.seconds, self.explored = state["round"], state["seconds"], state["explored"]
        self.allowed = state.get("allowed", self.explore * self.seconds)  # older versions did not count it
        if "crowd" in state:  # older versions did not tell texts apart
            self._crowd.restore(state["crowd"], self.sizes)
        for entry in state["costs"]:
            strategy = Strategy.parse(entry["strategy"])
            if strategy in self.strategies and entry["batch"] in self.sizes:
                self._costs[strategy][entry["batch"]] = Cost(entry["seconds"], entry["round"])
        for entry in state.get("catch_ups", []):  # older versions counted tokens, whatever the size
            if entry["batch"] in self.sizes:
                each = deque(entry["seconds"], maxlen=LATEST)
                self._catching_up.setdefault(entry["drafter"], {})[entry["batch"]] = each
        for family, entry in state["acceptance"].items():
            if family in self._acceptance:
                self._acceptance[family] = Acceptance(**entry)


def sizes(most: int) -> list[int]:
    """Batch sizes that are kept apart: 1, 2, 3, 4, 6, 8, 12, … so that neighbours differ by at most a half."""
    ladder = {most, 1}
    size = 2
    while size < most:
        ladder |= {size, min(most, size * 3 // 2)}
        size *= 2
    return sorted(ladder)


def _work(strategy: Strategy) -> int:
    """What a round does beyond plain decoding, roughly: guesses to check and passes to make them."""
    return strategy.nodes + strategy.depth
