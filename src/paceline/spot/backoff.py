"""When training the drafter gains nothing any more, it happens less often; when the policy moves, it is back at once.

The gain of a version is the ratio of expected accept lengths, trained over published, on the same held-out answers, so
it hardly depends on which answers those are. If several versions together gained next to nothing, training pauses for
one step in two, then three in four, then seven in eight. Acceptance from step to step shows whether the drafter falls
behind: on held-out answers when there is an evaluation, and in the rollout itself in every step, because in most of
them there is no evaluation then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

if TYPE_CHECKING:
    from paceline.spot.evaluation import Evaluation

GAIN_VERSIONS = 4  # versions over which gains are added up
MIN_GAIN = 0.005  # relative, of so many versions together: less is not worth training for
RESUME_DROP = 0.05  # relative, below the best of late: more than the answers of one step and the next differ by chance
MAX_EVERY = 8  # steps: train at least once in so many
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
    def __init__(self, max_every: int = MAX_EVERY):
        """Trains at least once in `max_every` steps; 1 never backs off."""
        self.max_every = max_every
        self.every = 1
        """Training is due in one step out of so many."""
        self._gains: list[float] = []  # of the versions since `every` last changed
        self._levels: list[float] = []  # expected accept lengths of the last versions, on held-out answers
        self._rollout: float | None = None  # smoothed acceptance of rollouts
        self._best_rollout = 0.0  # of those, since training last began to be due in every step

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def note(self, evaluation: Evaluation) -> None:
        """A version was evaluated, on the held-out answers of all workers, whether it was published or not."""
        if not evaluation.tokens or not math.isfinite(evaluation.after / evaluation.before):
            return
        if self._levels and evaluation.before < (1 - RESUME_DROP) * max(self._levels):
            self._resume()
        # A version that was not published gained nothing, however bad it was; a little below nothing makes up for the
        # luck of those that were.
        self._gains = [*self._gains, max(-MIN_GAIN, evaluation.after / evaluation.before - 1)][-GAIN_VERSIONS:]
        self._levels = [*self._levels, evaluation.after if evaluation.better else evaluation.before][-GAIN_VERSIONS:]
        if len(self._gains) < GAIN_VERSIONS:
            return
        if sum(self._gains) < MIN_GAIN:
            self._change(min(self.max_every, 2 * self.every))
        else:
            self._change(max(1, self.every // 2))

    def note_rollout(self, acceptance: float) -> None:
        """Acceptance in the rollout of a step that drafted at all: any figure that rises with it, as long as it is
        always the same. The share of first draft tokens that were accepted, `rollout/spec_accept_at/1`, depends least
        on the strategies that were chosen."""
        before = acceptance if self._rollout is None else self._rollout
        self._rollout = SMOOTHING * acceptance + (1 - SMOOTHING) * before
        self._best_rollout = max(self._best_rollout, self._rollout)
        if self._rollout < (1 - RESUME_DROP) * self._best_rollout:
            self._resume()

    def _resume(self) -> None:
        """The policy has moved away: train in every step, and measure from where the drafter stands now."""
        self.every = 1
        self._gains = []
        self._levels = []
        self._best_rollout = self._rollout or 0.0

    def _change(self, every: int) -> None:
        if every != self.every:
            self.every = every
            self._gains = []

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
        self._gains = list(state["gains"])
        self._levels = list(state["levels"])
        self._rollout = state["rollout"]
        self._best_rollout = state["best_rollout"]
