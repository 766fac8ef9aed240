"""The difference between two evaluations, with its standard error and its 95 % interval.

Two checkpoints that answer the same prompts with the same noise are compared prompt by prompt: d_i = a_i - b_i, the
difference is the mean of the d_i, and its standard error is their standard deviation / sqrt(prompts). What is the same
for both, how hard a prompt is and how the dice fell, drops out of d_i. Beside it stand two standard errors that the
same difference would have had otherwise:

    unpaired      sqrt(se_a^2 + se_b^2): each checkpoint with prompts and noise of its own
    other dice    the same prompts, but each checkpoint with noise of its own: the paired variance plus what equal dice
                  took out of it, 2 / prompts^2 * sum over prompts of cov(a_ij, b_ij) / samples, where the covariance
                  over the answers j to a prompt is measured; it takes two samples per prompt
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from paceline.evaluation.scores import MEAN, EvalScores

CONFIDENCE = 0.95
SMALL_DF = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706)  # quantiles for so few degrees of freedom, from 1 on


@dataclass(frozen=True)
class PairedDifference:
    """Of one number, `a` minus `b`."""

    name: str
    a: float
    b: float
    se: float
    """Standard error of the difference on equal dice; NaN with one prompt."""
    se_unpaired: float
    """As if each had been evaluated on prompts and noise of its own."""
    se_other_dice: float | None
    """As if each had been evaluated on the same prompts with noise of its own; None where it cannot be known."""
    prompts: int
    changed: int
    """Prompts on which the two differ."""

    @property
    def difference(self) -> float:
        return self.a - self.b

    @property
    def low(self) -> float:
        """Of the 95 % interval."""
        return self.difference - student_t(self.prompts - 1) * self.se

    @property
    def high(self) -> float:
        return self.difference + student_t(self.prompts - 1) * self.se

    @property
    def narrower(self) -> float:
        """How many times smaller the standard error is than the unpaired one."""
        return self.se_unpaired / self.se if self.se > 0 else math.inf

    def as_json(self) -> dict[str, float | int | str | None]:
        return {
            "name": self.name,
            "a": self.a,
            "b": self.b,
            "difference": self.difference,
            "se": self.se,
            "interval_low": self.low,
            "interval_high": self.high,
            "se_unpaired": self.se_unpaired,
            "se_other_dice": self.se_other_dice,
            "prompts": self.prompts,
            "changed": self.changed,
        }


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of a number per prompt; prompts are what was drawn, so answers to one prompt count as one."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def compare_scores(a: EvalScores, b: EvalScores, name: str = MEAN) -> PairedDifference:
    """Both have the same prompts in the same order. Prompts without a value in either are left out."""
    assert len(a.prompts) == len(b.prompts), "the same prompts"
    pairs = [(x, y) for x, y in zip(a.per_prompt(name), b.per_prompt(name), strict=True) if math.isfinite(x + y)]
    if not pairs:
        return PairedDifference(name, math.nan, math.nan, math.nan, math.nan, None, 0, 0)
    first = [x for x, _ in pairs]
    second = [y for _, y in pairs]
    gaps = [x - y for x, y in pairs]
    se = standard_error(gaps)
    unpaired = math.hypot(standard_error(first), standard_error(second))
    other = _other_dice(a, b, se) if name == MEAN else None
    changed = sum(gap != 0 for gap in gaps)
    return PairedDifference(name, fmean(first), fmean(second), se, unpaired, other, len(pairs), changed)


def _other_dice(a: EvalScores, b: EvalScores, se: float) -> float | None:
    n = a.samples
    if n < 2 or n != b.samples or not math.isfinite(se):
        return None
    shared = sum(_covariance(p.rewards, q.rewards) / n for p, q in zip(a.prompts, b.prompts, strict=True))
    return math.sqrt(max(0.0, se**2 + 2 * shared / len(a.prompts) ** 2))


def _covariance(x: Sequence[float], y: Sequence[float]) -> float:
    middle_x, middle_y = fmean(x), fmean(y)
    return sum((u - middle_x) * (v - middle_y) for u, v in zip(x, y, strict=True)) / (len(x) - 1)


def student_t(df: int) -> float:
    """The two-sided 95 % quantile of Student's t: for few degrees of freedom from a table, else Cornish and Fisher's
    expansion around the normal quantile, right to 0.1 %."""
    if df < 1:
        return math.nan
    if df <= len(SMALL_DF):
        return SMALL_DF[df - 1]
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / df + second / df**2 + third / df**3
