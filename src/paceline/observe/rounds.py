"""The rounds of a rollout, told in short: stretches for the timeline, and sums by strategy and batch size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.observe.timeline import PLAIN, PREFILL, ROLLOUT, SPECULATIVE, Span

if TYPE_CHECKING:
    from paceline.rollout.stats import RoundRecord

VISIBLE = 500  # an interlude shorter than this part of the rollout so far could not be seen in a picture of it
TAIL = 4  # the tail is where fewer than one in four of the most texts still decode


class RoundLog:
    """Given to an engine as its `record`. Consecutive rounds of a kind become one span; `end` closes the rollout with a
    span around them all, whose arguments say what they came to. `add` is `Timeline.add`, or a list's `append` where
    somebody else writes the file."""

    def __init__(self, add: Callable[[Span], None], worker: int = 0, zero: float | None = None):
        """`zero` is the wall-clock time at which the engine's clock began; None takes it from the first round."""
        self.add, self.worker, self.step = add, worker, 0
        self._zero: float | None = zero
        self._clear()

    def _clear(self) -> None:
        self._begun: float | None = None
        self._stretch: _Stretch | None = None
        self._interlude: _Stretch | None = None
        self._sums: dict[str, dict[int, _Sum]] = {}
        self._by_batch: dict[int, float] = {}

    def __call__(self, round: RoundRecord) -> None:
        if self._zero is None:  # the engine's clock, read on the wall
            self._zero = time.time() - (round.at + round.seconds)
        if self._begun is None:
            self._begun = round.at
        if round.strategy != PREFILL:
            self._by_batch[round.batch] = self._by_batch.get(round.batch, 0.0) + round.seconds
            by_size = self._sums.setdefault(round.strategy, {})
            by_size.setdefault(bucket(round.batch), _Sum()).add(round)
        self._place(round, round.at + round.seconds - self._begun)

    def _place(self, round: RoundRecord, elapsed: float) -> None:
        """Into the stretch under way, or beside it, until it is clear whether that is more than an interlude."""
        kind, stretch, interlude = kind_of(round), self._stretch, self._interlude
        if stretch is None:
            self._stretch = _Stretch.of(round)
        elif interlude is None and kind == stretch.kind:
            if 2 * round.batch <= stretch.first:  # a new one, so that the picture can show how the batch shrinks
                self._write(stretch)
                self._stretch = _Stretch.of(round)
            else:
                stretch.take(round)
        elif interlude is None:
            self._interlude = _Stretch.of(round)
        elif kind == interlude.kind:
            interlude.take(round)
        elif kind == stretch.kind:
            stretch.absorb(interlude)
            stretch.take(round)
            self._interlude = None
        else:
            self._promote()
            self._interlude = _Stretch.of(round)
        if self._interlude and self._interlude.seconds * VISIBLE >= elapsed:
            self._promote()

    def _promote(self) -> None:
        """The interlude is a stretch of its own."""
        if self._stretch:
            self._write(self._stretch)
        self._stretch, self._interlude = self._interlude, None

    def _write(self, stretch: _Stretch) -> None:
        batch = {"batch": [stretch.first, stretch.last]} if stretch.kind != PREFILL else {}
        others = {"interludes": stretch.others} if stretch.others else {}
        args = {"rounds": stretch.rounds, "tokens": stretch.tokens} | batch | others
        self._span(stretch.kind, stretch.start, stretch.end, args)

    def _span(self, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        assert self._zero is not None
        self.add(Span(self.worker, name, self._zero + start, end - start, self.step, args))

    def end(self) -> None:
        """The rollout is over."""
        for stretch in (self._stretch, self._interlude):
            if stretch:
                self._write(stretch)
        last = self._interlude or self._stretch
        if last and self._begun is not None:
            peak = max(self._by_batch, default=0)
            tail = sum(seconds for batch, seconds in self._by_batch.items() if batch * TAIL < peak)
            sums = {s: {str(n): v.row() for n, v in sorted(by.items())} for s, by in sorted(self._sums.items())}
            args = {"peak": peak, "tail_s": _short(tail), "strategies": sums}
            self._span(ROLLOUT, self._begun, last.end, args)
        self._clear()


@dataclass
class _Stretch:
    kind: str
    start: float
    end: float
    first: int
    last: int
    rounds: int
    tokens: int
    others: int = 0
    """Rounds of another kind in between, too few to be seen."""

    @classmethod
    def of(cls, round: RoundRecord) -> _Stretch:
        end = round.at + round.seconds
        return cls(kind_of(round), round.at, end, round.batch, round.batch, 1, round.tokens)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def take(self, round: RoundRecord) -> None:
        self.end, self.last = round.at + round.seconds, round.batch
        self.rounds += 1
        self.tokens += round.tokens

    def absorb(self, other: _Stretch) -> None:
        self.end = other.end
        self.others += other.rounds + other.others
        self.tokens += other.tokens


@dataclass
class _Sum:
    """The rounds of a strategy at a batch size."""

    seconds: list[float] = field(default_factory=list)
    worth: float = 0.0
    tokens: int = 0

    def add(self, round: RoundRecord) -> None:
        self.seconds.append(round.seconds)
        self.worth += round.tokens / round.batch
        self.tokens += round.tokens

    def row(self) -> list[float]:
        """As `Tally` reads it."""
        seconds = self.seconds
        return [len(seconds), _short(sum(seconds)), _short(median(seconds)), _short(self.worth), self.tokens]


@dataclass(frozen=True)
class Tally:
    """What the rounds of one strategy at one batch size came to in one rollout."""

    step: int
    strategy: str
    size: int
    rounds: int
    seconds: float
    median: float
    """Seconds of a round."""
    worth: float
    """Rounds that plain decoding would have needed: tokens per text, summed over rounds."""
    tokens: int


def tallies(spans: list[Span]) -> list[Tally]:
    """All that the rollouts of a timeline say of their rounds."""
    out = []
    for span in spans:
        for strategy, by_size in span.args.get("strategies", {}).items():
            for size, (rounds, seconds, typical, worth, tokens) in by_size.items():
                out.append(Tally(span.step, strategy, int(size), int(rounds), seconds, typical, worth, int(tokens)))
    return out


def kind_of(round: RoundRecord) -> str:
    return {"prefill": PREFILL, "plain": PLAIN}.get(round.strategy, SPECULATIVE)


def bucket(batch: int) -> int:
    """The sizes that the tuner keeps apart: 1, 2, 3, 4, 6, 8, 12, 16, …; each stands for those above the one before."""
    power = 1 << max(0, batch - 1).bit_length()
    return power * 3 // 4 if power >= 4 and batch <= power * 3 // 4 else power


def below(size: int) -> int:
    """The next smaller bucket; 0 below the smallest."""
    return size * 3 // 4 if size & (size - 1) == 0 else size * 2 // 3


def above(size: int) -> int:
    return bucket(size + 1)


def _short(seconds: float) -> float:
    return round(seconds, 6)
