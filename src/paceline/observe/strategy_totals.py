"""Sums over the rounds of a rollout, by strategy and batch size: written into the timeline, read by the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING

from paceline.observe.timeline import Span

if TYPE_CHECKING:
    from paceline.rollout.stats import RoundRecord


@dataclass
class RoundSums:
    """Rounds of one strategy in one bucket of batch sizes, while they are counted."""

    seconds: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)
    plain_equivalent: float = 0.0
    tokens: int = 0

    def add(self, round: RoundRecord, steady: bool) -> None:
        self.seconds.append(round.seconds)
        if steady:
            self.steady.append(round.seconds)
        self.plain_equivalent += round.tokens / round.batch
        self.tokens += round.tokens

    def row(self) -> list[float]:
        """As `read_totals` reads it."""
        seconds = self.seconds
        steady = self.steady or seconds
        typical = rounded(median(steady))
        equivalent = rounded(self.plain_equivalent)
        return [len(seconds), rounded(sum(seconds)), typical, equivalent, self.tokens, rounded(fmean(steady))]


@dataclass(frozen=True)
class StrategyTotals:
    """The rounds of one strategy in one bucket of batch sizes in one rollout."""

    step: int
    strategy: str
    bucket: int
    """The largest batch size of the bucket."""
    rounds: int
    seconds: float
    median_s: float
    """Seconds of one round, the median of those that followed one of the same strategy and batch size, if any did:
    the first one builds what the next ones reuse."""
    plain_equivalent: float
    """Plain rounds that would have written as much: the sum over rounds of tokens / sequences in the batch."""
    tokens: int
    mean_s: float
    """As `median_s`, the mean."""


def read_totals(spans: list[Span]) -> list[StrategyTotals]:
    """Of all rollouts of a timeline."""
    out = []
    for span in spans:
        for strategy, by_bucket in span.args.get("strategies", {}).items():
            for bucket, (rounds, seconds, typical, equivalent, tokens, *steady) in by_bucket.items():
                counts = (span.step, strategy, int(bucket), int(rounds))
                mean = steady[0] if steady else seconds / rounds  # earlier runs have none
                out.append(StrategyTotals(*counts, seconds, typical, equivalent, int(tokens), mean))
    return out


def bucket_of(batch: int) -> int:
    """The tuner's buckets, named by their largest batch size: 1, 2, 3, 4, 6, 8, 12, 16, …"""
    power = 1 << max(0, batch - 1).bit_length()
    return power * 3 // 4 if power >= 4 and batch <= power * 3 // 4 else power


def bucket_below(bucket: int) -> int:
    """The next smaller bucket; 0 below the smallest."""
    return bucket * 3 // 4 if bucket & (bucket - 1) == 0 else bucket * 2 // 3


def bucket_above(bucket: int) -> int:
    return bucket_of(bucket + 1)


def rounded(seconds: float) -> float:
    """To the microsecond, as the timeline has it."""
    return round(seconds, 6)
