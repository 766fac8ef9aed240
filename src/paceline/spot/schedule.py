"""What happens to the drafter after an update of the policy: training for a share of the time, or as an investment; and
the next version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.draft.eagle.trainer import TrainSettings
from paceline.draft.registry import choose_strategies
from paceline.spot.investment import LearningCurve, decide
from paceline.spot.rollout_time import RolloutTime, chain_length
from paceline.spot.trainer import TrainingStats

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from paceline.config import Config
    from paceline.rollout.stats import RoundRecord
    from paceline.spot.evaluation import Evaluation
    from paceline.spot.versions import Versions

MEASURE_SHARE = 0.15  # of the seconds of a stretch of training: the most that evaluating it may take
MIN_STRETCH_S = 0.5
CHAIN = TrainSettings.runs  # draft tokens of the chains that drafters are evaluated with
MAX_STRETCHES = 8  # in a step: more of the same answers is not what the next ones will be like

Rollouts = Sequence[Sequence["RoundRecord"]]
"""Rounds by worker."""


class StepClock(Protocol):
    """Times the parts of a step."""

    @property
    def elapsed(self) -> float: ...
    def part(self, name: str) -> AbstractContextManager[object]: ...


class DrafterProgress(Protocol):
    """The drafter's part of what a checkpoint knows."""

    drafter_version: int
    backoff: dict[str, Any] | None
    investment: dict[str, Any] | None


class Trainers(Protocol):
    """All workers together."""

    @property
    def workers(self) -> Sequence[int]: ...
    def train_drafter(self, seconds: float) -> TrainingStats: ...
    def merge_drafters(self) -> Evaluation | None: ...


class DrafterSchedule:
    def __init__(
        self, config: Config, when: str, versions: Versions, trainers: Trainers, curve: dict[str, Any] | None = None
    ):
        """`when` is what `spot.when` means for this run; `curve` is what a checkpoint knows of an investment."""
        self.config = config
        self.when = when
        self.versions = versions
        self.trainers = trainers
        self.curve: LearningCurve | None = None
        """Where training time is an investment."""
        if config.spot.invest and when != "off":
            self.curve = LearningCurve(CHAIN + 1, **curve) if curve else LearningCurve(CHAIN + 1)
        strategies = choose_strategies(config.speculation, True)
        self.rollout_time = RolloutTime(strategies, config.rollout.max_batch, CHAIN)

    def in_tail(self, step: int) -> bool:
        """Whether the drafter is trained in the tail of the rollout behind so many steps."""
        return self.when in ("tail", "both") and self.versions.training_is_due(step)

    def after_update(
        self,
        step: int,
        clock: StepClock,
        training: TrainingStats,
        first_accept_rate: float | None,
        rollouts: Rollouts,
        stopping: bool,
    ) -> dict[str, float]:
        """The policy has made update `step`. What was trained in the tail, the accepted share of first draft tokens and
        the rounds of the rollout are known -> metrics."""
        if self.when == "off":
            return {}
        due = self.versions.training_is_due(step - 1) and not stopping
        if self.curve is None and due and self.when in ("update", "both"):
            with clock.part("train_drafter"):
                training = self.trainers.train_drafter(self.config.spot.share * clock.elapsed)
        with clock.part("merge_drafter"):
            metrics = self.versions.make(self.trainers.merge_drafters, training, first_accept_rate)
        if self.curve is None:
            return metrics
        self.rollout_time.observe(rollouts, max(1, len(self.trainers.workers)))
        self._begin_where_it_stands(self.curve, first_accept_rate)
        self.curve.saved_s += self.rollout_time.seconds(1.0) - self.rollout_time.seconds(self.curve.accept_length)
        self.curve.next_step()
        self._measure(self.curve, training, TrainingStats(), metrics)
        return metrics | (self._invest(self.curve, step, clock, training) if due else {})

    def _begin_where_it_stands(self, curve: LearningCurve, first_accept_rate: float | None) -> None:
        """A drafter that was trained before begins with an accept length of its own."""
        if self.config.speculation.drafter != "new" and not curve.efolds and first_accept_rate is not None:
            curve.accept_length = chain_length(first_accept_rate, CHAIN)

    def _invest(self, curve: LearningCurve, step: int, clock: StepClock, training: TrainingStats) -> dict[str, float]:
        """Train for as long as it is expected to pay back in the steps that are left."""
        metrics: dict[str, float] = {}
        invested = {"drafter/invested_s": 0.0}
        least = max(MIN_STRETCH_S, self.versions.took_s / MEASURE_SHARE)
        for _ in range(MAX_STRETCHES):
            left = self.config.steps - step
            decision = decide(curve, self.rollout_time.seconds, left, least)
            if not decision.seconds:
                break
            if not invested["drafter/invested_s"]:
                invested["drafter/invest_plan_s"] = decision.planned_s
                invested["drafter/invest_saves_s"] = decision.saved_s
            before = training
            with clock.part("train_drafter"):
                training = self.trainers.train_drafter(decision.seconds)
            if training.steps == before.steps:  # there is nothing to learn from
                break
            invested["drafter/invested_s"] += decision.seconds
            curve.invested_s += decision.seconds
            with clock.part("merge_drafter"):
                metrics |= self.versions.make(self.trainers.merge_drafters, training, None, now=True)
            if not self._measure(curve, training, before, metrics):
                break
        return metrics | invested

    def _measure(
        self, curve: LearningCurve, training: TrainingStats, before: TrainingStats, metrics: dict[str, float]
    ) -> bool:
        """Note a stretch of training, and what it was evaluated to bring, if it was -> whether it was."""
        workers = max(1, len(self.trainers.workers))
        curve.trained((training.seconds - before.seconds) / workers, (training.steps - before.steps) / workers)
        known = "drafter/expected_accept_after" in metrics
        if known:
            curve.measured(metrics["drafter/expected_accept_before"], metrics["drafter/expected_accept_after"])
        return known

    def write_to(self, progress: DrafterProgress) -> None:
        """What a checkpoint has to know."""
        if self.when == "off":
            return
        progress.drafter_version = self.versions.version
        progress.backoff = self.versions.backoff.state()
        progress.investment = self.curve.state() if self.curve else None
