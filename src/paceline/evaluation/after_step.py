"""What is done around a step besides learning: the policy is evaluated, callbacks are called, metrics are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core import Group
from paceline.evaluation.during_run import RunEvaluations
from paceline.observe.clock import Clock
from paceline.observe.hooks import Callback, StepHooks
from paceline.observe.live import LiveView
from paceline.observe.metrics import read_lines
from paceline.run.directory import Run
from paceline.run.saver import RunSaver

if TYPE_CHECKING:
    from paceline.setup.start import StartedRun


class AfterStep:
    def __init__(self, started: StartedRun, run: Run, view: LiveView, saver: RunSaver, callbacks: Sequence[Callback]):
        self.evaluations = RunEvaluations(started.config, run, started.evaluator, view, saver)
        self.hooks = StepHooks(started.config, read_lines(run.folder / "metrics.jsonl"), callbacks)
        self.metrics_log = started.metrics_log
        self.view = view

    @property
    def ends_run(self) -> bool:
        """Whether a callback has asked for the run to end here."""
        return self.hooks.stopped is not None

    @property
    def saves(self) -> bool:
        """Whether the last step made the best checkpoint so far, which is to be saved."""
        return self.evaluations.improved

    def begin(self, step: int) -> None:
        """Before the first step that is made."""
        self.evaluations.begin(step, self.metrics_log)

    def evaluate(self, step: int, clock: Clock) -> dict[str, float]:
        """Metrics of the evaluation after a step, if one is due."""
        return self.evaluations.after(step, clock)

    def learned_from(self, groups: list[Group]) -> None:
        self.hooks.groups = groups

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """The step is over: callbacks may add to its metrics."""
        for note in self.hooks.after(step, metrics):
            self.view.note(note)
        self.metrics_log.write(step, metrics)
        self.view.step_done(step, metrics)

    def close(self) -> None:
        self.metrics_log.close()
        self.evaluations.close()
