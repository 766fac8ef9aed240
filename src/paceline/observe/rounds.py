"""The rounds of a rollout as few spans of the timeline: consecutive rounds of a kind become one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.observe.strategy_totals import RoundSums, bucket_of, rounded
from paceline.observe.timeline import DECODE_PLAIN, DECODE_SPECULATIVE, PREFILL, ROLLOUT, Span

if TYPE_CHECKING:
    from paceline.rollout.stats import RoundRecord

MIN_VISIBLE = 1 / 500  # of the rollout's seconds so far; a span that is shorter would be thinner than a pixel
TAIL_FRACTION = 1 / 4  # the tail is where the batch is below this fraction of the rollout's largest


class RoundLog:
    """Given to an engine as its `record`. Consecutive rounds of a kind become one span; `end` closes the rollout with a
    span around them all, whose arguments are the sums by strategy and batch size. `add` is `Timeline.add`, or a list's
    `append` where another process writes the file."""

    def __init__(self, add: Callable[[Span], None], worker: int = 0, zero: float | None = None):
        """`zero` is the wall-clock time at which the engine's clock began; None takes it from the first round."""
        self.add = add
        self.worker = worker
        self.step = 0
        self._zero = zero
        self._clear()

    def _clear(self) -> None:
        self._began: float | None = None
        self._current: _OpenSpan | None = None
        self._interlude: _OpenSpan | None = None
        """Rounds of another kind since the current span, as long as they may be too short for a span of their own."""
        self._sums: dict[str, dict[int, RoundSums]] = {}
        self._last: tuple[str, int] | None = None
        """Strategy and batch size of the last round."""
        self._seconds_at: dict[int, float] = {}
        """Decoding seconds by batch size."""

    def __call__(self, round: RoundRecord) -> None:
        if self._zero is None:
            self._zero = time.time() - (round.at + round.seconds)
        if self._began is None:
            self._began = round.at
        if round.strategy != PREFILL:
            self._seconds_at[round.batch] = self._seconds_at.get(round.batch, 0.0) + round.seconds
            by_bucket = self._sums.setdefault(round.strategy, {})
            steady = (round.strategy, round.batch) == self._last
            by_bucket.setdefault(bucket_of(round.batch), RoundSums()).add(round, steady)
        self._last = (round.strategy, round.batch)
        self._place(round)
        elapsed = round.at + round.seconds - self._began
        if self._interlude and self._interlude.seconds >= MIN_VISIBLE * elapsed:
            self._promote()

    def _place(self, round: RoundRecord) -> None:
        """Into the current span or the interlude, or into a new one."""
        kind = kind_of(round)
        current = self._current
        interlude = self._interlude
        if current is None:
            self._current = _OpenSpan.of(round)
        elif interlude is None and kind == current.kind:
            if 2 * round.batch <= current.first_batch:  # a new one, so that the picture can show how the batch shrinks
                self._write(current)
                self._current = _OpenSpan.of(round)
            else:
                current.extend(round)
        elif interlude is None:
            self._interlude = _OpenSpan.of(round)
        elif kind == interlude.kind:
            interlude.extend(round)
        elif kind == current.kind:
            current.absorb(interlude)
            current.extend(round)
            self._interlude = None
        else:
            self._promote()
            self._interlude = _OpenSpan.of(round)

    def _promote(self) -> None:
        """The interlude becomes the current span."""
        if self._current:
            self._write(self._current)
        self._current = self._interlude
        self._interlude = None

    def _write(self, span: _OpenSpan) -> None:
        args: dict[str, Any] = {"rounds": span.rounds, "tokens": span.tokens}
        if span.kind != PREFILL:
            args["batch"] = [span.first_batch, span.last_batch]
        if span.interludes:
            args["interludes"] = span.interludes
        self._add(span.kind, span.start, span.end, args)

    def _add(self, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        assert self._zero is not None
        self.add(Span(self.worker, name, self._zero + start, end - start, self.step, args))

    def end(self) -> None:
        """The rollout is over."""
        for span in (self._current, self._interlude):
            if span:
                self._write(span)
        last = self._interlude or self._current
        if last and self._began is not None:
            peak = max(self._seconds_at, default=0)
            tail = sum(seconds for batch, seconds in self._seconds_at.items() if batch < TAIL_FRACTION * peak)
            sums = {s: {str(n): v.row() for n, v in sorted(by.items())} for s, by in sorted(self._sums.items())}
            self._add(ROLLOUT, self._began, last.end, {"peak": peak, "tail_s": rounded(tail), "strategies": sums})
        self._clear()


@dataclass
class _OpenSpan:
    """Consecutive rounds of a kind; times by the engine's clock."""

    kind: str
    start: float
    end: float
    first_batch: int
    last_batch: int
    rounds: int
    tokens: int
    interludes: int = 0
    """Rounds of another kind in between, too short to be seen."""

    @classmethod
    def of(cls, round: RoundRecord) -> _OpenSpan:
        end = round.at + round.seconds
        return cls(kind_of(round), round.at, end, round.batch, round.batch, 1, round.tokens)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def extend(self, round: RoundRecord) -> None:
        self.end = round.at + round.seconds
        self.last_batch = round.batch
        self.rounds += 1
        self.tokens += round.tokens

    def absorb(self, other: _OpenSpan) -> None:
        self.end = other.end
        self.interludes += other.rounds + other.interludes
        self.tokens += other.tokens


def kind_of(round: RoundRecord) -> str:
    """The name of its span."""
    return {"prefill": PREFILL, "plain": DECODE_PLAIN}.get(round.strategy, DECODE_SPECULATIVE)
