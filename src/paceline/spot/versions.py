"""When a new version of the drafter is made from what workers have trained, and how often they train at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.config import SpotConfig
from paceline.spot.backoff import Backoff
from paceline.spot.evaluation import Evaluation
from paceline.spot.trainer import TrainingStats

Merge = Callable[[], Evaluation | None]
"""Makes a version out of what all have trained and judges it; None if there was nothing to make or to judge by."""


class Versions:
    def __init__(self, config: SpotConfig, version: int = 0, backoff: dict[str, Any] | None = None):
        """Goes on from a version, and from what was known about how often to train."""
        self.version = version
        self.backoff = Backoff(config.max_interval)
        if backoff:
            self.backoff.load(backoff)
        self._share = config.merge_share
        self._unmerged = False
        self._made, self._took = 0.0, 0.0  # when the last one was made, and how long that took

    def training_is_due(self, step: int) -> bool:
        return self.backoff.due(step)

    def make(self, merge: Merge, spell: TrainingStats, first_holds: float | None) -> dict[str, float]:
        """After the training of a step, make the next version if its turn has come -> what happened, as metrics.
        `first_holds` is the share of first guesses that held in the step's rollout, if there were guesses."""
        self._unmerged |= spell.steps > 0
        verdict = None
        if self._unmerged and time.perf_counter() - self._made >= self._took / self._share:
            started = time.perf_counter()
            verdict = merge()
            self._made = time.perf_counter()
            self._took, self._unmerged = self._made - started, False
        published = verdict is not None and verdict.better
        self.version += published
        if verdict is not None:
            self.backoff.note(verdict)
        if first_holds is not None:
            self.backoff.note_rollout(first_holds)
        return self._describe(published, spell, verdict)

    def _describe(self, published: bool, spell: TrainingStats, verdict: Evaluation | None) -> dict[str, float]:
        metrics = {
            "drafter/version": float(self.version),
            "drafter/published": float(published),
            "drafter/steps": float(spell.steps),
            "drafter/skipped_steps": float(spell.thrown_away),
            "drafter/train_interval": float(self.backoff.every),
        }
        if spell.steps:
            metrics |= {"drafter/loss": spell.loss, "drafter/tok_s": spell.tokens / spell.seconds}
        if verdict is not None:
            metrics["drafter/expected_accept_before"] = verdict.before
            metrics["drafter/expected_accept_after"] = verdict.after
        return metrics
