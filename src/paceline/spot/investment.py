"""How long to train the drafter beyond idle time: as an investment that has to pay back within the run.

    saved(x)  = steps left * (rollout seconds at the accept length of now - at that after x more seconds of training)
    invest x  that makes saved(x) / PAYBACK - x largest, if that is above zero

Measured on the embedded reasoner and on larger ones, the accept length grows by about as much whenever the seconds of
training are multiplied by e. How much is learned from every stretch of training, before and after on the same held-out
answers, and counted from what is usual. What a rollout would take with another drafter is `spot.rollout_seconds`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import exp, log, log1p
from typing import Annotated

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

USUAL_SLOPE = 0.9  # tokens of accept length for each factor e of training seconds
USUAL_WEIGHT = 1.0  # factors of e whose measurement counts as much as what is usual
FADE_PER_E = 0.7  # weight of what was measured, one factor of e of training later
NEW_ANSWERS = 0.5  # weight of what was measured on the answers of one step, in the next
FIRST_STEPS = 50  # training steps after which the first of those factors begins
RISK = 0.1  # of the rollouts that are left: more is not spent, net of what was saved, on what is usual alone
PAYBACK = 1.5  # seconds that have to be expected back for each one that is invested: forecasts are wrong
GROWTH = 0.5  # of the training so far, at most, before it is measured again
FINENESS = 1.25  # factor between two amounts that are compared

RolloutSeconds = Callable[[float], float]
"""Seconds of a step's rollout, if the expected accept length on held-out answers were this."""


class CurveState(TypedDict):
    """As a checkpoint keeps it."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # type: ignore[misc]
    accept_length: Annotated[float, Field(ge=1)]
    trained_s: Annotated[float, Field(ge=0)]
    step_s: Annotated[float, Field(ge=0)]
    gained: float
    efolds: Annotated[float, Field(ge=0)]
    unmeasured_s: Annotated[float, Field(ge=0)]
    invested_s: Annotated[float, Field(ge=0)]
    saved_s: float


@dataclass
class LearningCurve:
    """Expected accept length against seconds of training, as far as it was measured."""

    most: float
    """The accept length that no drafter exceeds: with chains of k draft tokens, k + 1."""
    accept_length: float = 1.0
    """Of the published drafter, when that was last evaluated."""
    trained_s: float = 0.0
    step_s: float = 0.05
    """Of a training step, lately."""
    gained: float = 0.0
    """Tokens of accept length that stretches of training have brought, with older ones fading."""
    efolds: float = 0.0
    """And the factors of e by which they have extended the training."""
    unmeasured_s: float = 0.0
    """Trained since it was last measured."""
    invested_s: float = 0.0
    """Trained beyond idle time."""
    saved_s: float = 0.0
    """Seconds of rollout that the drafter has saved so far."""

    def slope(self, measured: bool = False) -> float:
        """Tokens of accept length for each factor e of training: of what was measured and what is usual, or `measured`
        alone."""
        weight = 0.0 if measured else USUAL_WEIGHT
        factors = self.efolds + weight
        return max(0.0, (self.gained + USUAL_SLOPE * weight) / factors) if factors else 0.0

    @property
    def since(self) -> float:
        """Seconds of training, from a first few steps on, from which factors are counted."""
        return self.trained_s + FIRST_STEPS * self.step_s

    def after(self, seconds: float, measured: bool = False) -> float:
        """The accept length to be expected after so much more training."""
        gain = self.slope(measured) * log1p(seconds / self.since)
        return max(self.accept_length, min(self.most, self.accept_length + gain))

    def trained(self, seconds: float, steps: float) -> None:
        """So much was trained, whoever measures it."""
        if steps:
            self.step_s = seconds / steps
        self.trained_s += seconds
        self.unmeasured_s += seconds

    def next_step(self) -> None:
        """There are other answers to learn from now: that training on the last ones had no more to give says less."""
        self.gained *= NEW_ANSWERS
        self.efolds *= NEW_ANSWERS

    def measured(self, before: float, after: float) -> None:
        """What was trained since the last time has changed the accept length on the same held-out answers."""
        self.accept_length = max(1.0, before, after)
        factor = log(self.since / (self.since - self.unmeasured_s))
        fade = exp(log(FADE_PER_E) * factor)
        self.gained = fade * self.gained + (after - before)
        self.efolds = fade * self.efolds + factor
        self.unmeasured_s = 0.0

    def state(self) -> dict[str, float]:
        """As a checkpoint keeps it: `CurveState`."""
        return {name: value for name, value in asdict(self).items() if name != "most"}


@dataclass(frozen=True)
class Decision:
    seconds: float
    """To train now, before it is measured again; 0 where more would not pay."""
    planned_s: float = 0.0
    """To train in all, as far as is known now."""
    saved_s: float = 0.0
    """Seconds of rollout that this is expected to save within the run."""
    accept_length: float = 1.0
    """To be expected after it."""


def decide(curve: LearningCurve, rollout_s: RolloutSeconds, steps_left: int, least_s: float) -> Decision:
    """What to invest now. No stretch of training is shorter than `least_s`, which evaluating it is worth. A drafter
    that does not learn must not cost much, so of what is not paid back yet only RISK rests on what is usual."""
    spent_s = curve.invested_s - curve.saved_s
    now = rollout_s(curve.accept_length)
    best = Decision(0.0)
    net = 0.0
    seconds = least_s
    while seconds <= steps_left * now / PAYBACK:  # more could not come back if rollouts took no time at all
        risky = spent_s + seconds > RISK * steps_left * now
        accept_length = curve.after(seconds, measured=risky)
        saved = steps_left * (now - rollout_s(accept_length))
        if saved / PAYBACK - seconds > net:
            net = saved / PAYBACK - seconds
            piece = min(seconds, max(least_s, GROWTH * curve.since))
            best = Decision(piece, seconds, saved, accept_length)
        seconds *= FINENESS
    return best
