"""When a new version of the drafter is made from what workers have trained, and how often they train at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.spot.backoff import Backoff
from paceline.spot.evaluation import Evaluation

if TYPE_CHECKING:
    from paceline.config import SpotConfig
    from paceline.spot.trainer import TrainingStats

Merge = Callable[[], Evaluation | None]
"""Makes a version out of what all have trained and evaluates it; None if nobody trained, or no answer is held out."""


class Versions:
    def __init__(
        self,
        config: SpotConfig,
        version: int = 0,
        backoff: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Resumes from a version, and from what was known about how often to train."""
        self.version = version
        self.backoff = Backoff(config.max_interval)
        if backoff:
            self.backoff.load(backoff)
        self._clock = clock
        self._merge_share = config.merge_share
        self._unmerged = False  # trained since the last version was made
        self._made_at = 0.0  # when the last one was made
        self.took_s = 0.0
        """Seconds that making the last one took."""

    def training_is_due(self, step: int) -> bool:
        return self.backoff.due(step)

    def make(
        self, merge: Merge, training: TrainingStats, first_accept_rate: float | None, now: bool = False
    ) -> dict[str, float]:
        """After the training of a step, make the next version if its turn has come, or `now` -> what happened, as
        metrics. `first_accept_rate` is the share of first draft tokens that were accepted in the step's rollout, if
        there were any."""
        self._unmerged |= training.steps > 0
        evaluation = None
        if self._unmerged and (now or self._clock() - self._made_at >= self.took_s / self._merge_share):
            started = self._clock()
            evaluation = merge()
            self._made_at = self._clock()
            self.took_s = self._made_at - started
            self._unmerged = False
        published = evaluation is not None and evaluation.better
        self.version += published
        if evaluation is not None:
            self.backoff.note(evaluation)
        if first_accept_rate is not None:
            self.backoff.note_rollout(first_accept_rate)
        return self._describe(published, training, evaluation)

    def _describe(self, published: bool, training: TrainingStats, evaluation: Evaluation | None) -> dict[str, float]:
        metrics = {
            "drafter/version": float(self.version),
            "drafter/published": float(published),
            "drafter/steps": float(training.steps),
            "drafter/skipped_steps": float(training.discarded),
            "drafter/train_interval": float(self.backoff.every),
        }
        if training.steps:
            metrics |= {"drafter/loss": training.loss, "drafter/tok_s": training.tokens / training.seconds}
        if evaluation is not None:
            metrics["drafter/expected_accept_before"] = evaluation.before
            metrics["drafter/expected_accept_after"] = evaluation.after
        return metrics
