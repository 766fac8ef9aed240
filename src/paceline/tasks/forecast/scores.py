"""Proper scoring rules: in expectation nobody gains by saying something else than what he believes.

With quantiles q_k at levels p_k and the outcome y, the quantile score is 2/K sum_k (1{g(y) < g(q_k)} - p_k) (g(q_k) -
g(y)), which approaches the CRPS as levels become denser. g(x) = s tanh(x / s), which keeps order and therefore the
rule proper, bounds it by 2 s: on the day of a crash an honest forecast must not be worth less than none. With
probabilities of regimes the ranked probability score is the mean over thresholds of (P[regime <= k] - 1{it was})^2,
at most 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from paceline.tasks.answers import final_answer

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
REGIMES = ("calm", "normal", "turbulent")
WORST = -1.0
"""Reward of what is no forecast, and of the worst one that there is."""
MAX_RETURN = 1e3  # percent: a quantile beyond is no forecast
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?![\d.])")


@dataclass(frozen=True)
class Prediction:
    quantiles: tuple[float, ...]
    """Of the return in percent, at `LEVELS`."""
    regimes: tuple[float, ...]
    """Probabilities, which add up to 1."""


def parse_prediction(text: str) -> Prediction | None:
    """Five quantiles in order and three probabilities, in the final answer or else the last line; None if they are not
    there."""
    answer = final_answer(text)
    lines = text.strip().splitlines()
    numbers = [float(n) for n in NUMBER.findall(answer if answer is not None else lines[-1] if lines else "")]
    if len(numbers) != len(LEVELS) + len(REGIMES):
        return None
    quantiles, weights = numbers[: len(LEVELS)], numbers[len(LEVELS) :]
    ordered = all(a <= b for a, b in pairwise(quantiles))
    if not ordered or max(map(abs, quantiles)) > MAX_RETURN or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        return None
    return Prediction(tuple(quantiles), tuple(w / sum(weights) for w in weights))


def quantile_score(quantiles: Sequence[float], outcome: float, scale: float) -> float:
    """In percent of return, at most 2 `scale`; lower is better."""
    y = _bounded(outcome, scale)
    bounded = [_bounded(q, scale) for q in quantiles]
    losses = ((y < q) * (q - y) - level * (q - y) for level, q in zip(LEVELS, bounded, strict=True))
    return 2 / len(LEVELS) * sum(losses)


def _bounded(value: float, scale: float) -> float:
    return scale * math.tanh(value / scale)


def ranked_score(probabilities: Sequence[float], regime: int) -> float:
    """From 0 to 1; lower is better."""
    thresholds = range(len(probabilities) - 1)
    return fmean((sum(probabilities[: k + 1]) - (regime <= k)) ** 2 for k in thresholds)


def score(prediction: Prediction, outcome: float, regime: int, scale: float) -> float:
    """The reward: 1 for knowing the outcome, -1 for the worst forecast. It is affine in both scores, and so as proper
    as they are."""
    quantile = quantile_score(prediction.quantiles, outcome, scale) / (2 * scale)
    return 1 - quantile - ranked_score(prediction.regimes, regime)
