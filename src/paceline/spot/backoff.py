"""When training the drafter wins nothing any more, it happens less often; when the policy moves, it is back at once.

What training wins shows on the answers kept aside: the published drafter and the trained one are judged on the same
ones, so their ratio says what the latest version was worth and hardly depends on which answers those were. If several
versions together were worth next to nothing, training pauses for one step in two, then three in four, then seven in
eight. How well guesses hold from step to step shows whether the drafter falls behind: on the answers kept aside when
there is a verdict, and in the rollout itself in every step, because in most of them there is no verdict then.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from paceline.spot.evaluation import Evaluation

VERSIONS = 4  # over which gains are added up
LITTLE = 0.005  # a gain, relative, that is not worth training for
DROP = 0.05  # below the best of late, relative: more than the answers of one step and the next differ by chance
RARELY = 8  # at least once in so many steps
SMOOTHING = 0.5  # share of the newest rollout in the average; single steps have other answers and other strategies


class BackoffState(TypedDict):
    """As a checkpoint keeps it."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # type: ignore[misc]
    every: Annotated[int, Field(ge=1, le=2**62)]
    gains: list[float]
    levels: list[float]
    rollout: float | None
    best_rollout: float


class Backoff:
    def __init__(self, rarely: int = RARELY):
        """Trains at least once in `rarely` steps; 1 never backs off."""
        self.rarely = rarely
        self.every = 1
        """Training is due in one step out of so many."""
        self._gains: list[float] = []  # of the versions since `every` last changed
        self._levels: list[float] = []  # tokens per check of the last versions, on answers kept aside
        self._rollout: float | None = None  # smoothed tokens per check of rollouts
        self._best_rollout = 0.0  # of those, since training last began to be due in every step

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def note(self, verdict: Evaluation) -> None:
        """A version has been judged, on the answers of all workers, whether it was published or not."""
        if not verdict.tokens or not math.isfinite(verdict.after / verdict.before):
            return
        if self._levels and verdict.before < (1 - DROP) * max(self._levels):
            self._resume()
        # A version that was not published won nothing, however bad it was; a little below nothing makes up for the
        # luck of those that were.
        self._gains = [*self._gains, max(-LITTLE, verdict.after / verdict.before - 1)][-VERSIONS:]
        self._levels = [*self._levels, verdict.after if verdict.better else verdict.before][-VERSIONS:]
        if len(self._gains) < VERSIONS:
            return
        if sum(self._gains) < LITTLE:
            self._change(min(self.rarely, 2 * self.every))
        else:
            self._change(max(1, self.every // 2))

    def note_rollout(self, accept_length: float) -> None:
        """Tokens per check that the drafter reached in the rollout of a step, where it guessed at all. Any other figure
        will do that rises with how well guesses hold, as long as it is always the same: the share of first guesses that
        held, `rollout/spec_accept_at/1`, depends least on the strategies that were chosen."""
        before = accept_length if self._rollout is None else self._rollout
        self._rollout = SMOOTHING * accept_length + (1 - SMOOTHING) * before
        self._best_rollout = max(self._best_rollout, self._rollout)
        if self._rollout < (1 - DROP) * self._best_rollout:
            self._resume()

    def _resume(self) -> None:
        """The policy has moved away: train in every step, and measure from where the drafter stands now."""
        self.every = 1
        self._gains, self._levels = [], []
        self._best_rollout = self._rollout or 0.0

    def _change(self, every: int) -> None:
        if every != self.every:
            self.every, self._gains = every, []

    def state(self) -> dict[str, Any]:
        return {
            "every": self.every,
            "gains": self._gains,
            "levels": self._levels,
            "rollout": self._rollout,
            "best_rollout": self._best_rollout,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.every = state["every"]
        self._gains, self._levels = list(state["gains"]), list(state["levels"])
        self._rollout, self._best_rollout = state["rollout"], state["best_rollout"]
