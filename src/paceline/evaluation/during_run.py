"""The evaluations of a run: before the first step, every so many steps, after the last; and its best checkpoint.

An evaluation belongs to a step as its metrics do. It is made before the step's checkpoint is saved, so a run that was
killed makes it again, to the same numbers; and one that a stop came in the middle of is made first on resuming.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.evaluation.metrics import eval_metrics
from paceline.evaluation.paired import compare_scores
from paceline.evaluation.records import EvalRecord, read_records, write_eval_samples, write_record
from paceline.evaluation.text import describe_difference, describe_record
from paceline.run.best import BestCheckpoint, read_best, write_best

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.evaluation.evaluator import Evaluator
    from paceline.observe.clock import Clock
    from paceline.observe.live import LiveView
    from paceline.observe.metrics import MetricsLog
    from paceline.run import Run
    from paceline.run.saver import RunSaver


class RunEvaluations:
    def __init__(self, config: Config, run: Run, evaluator: Evaluator | None, view: LiveView, saver: RunSaver):
        """Without an evaluator nothing is evaluated. `config` is the resolved one."""
        self.config = config
        self.run = run
        self.evaluator = evaluator
        self.view = view
        self.saver = saver
        self.improved = False
        """Whether the last step made the best checkpoint so far, which is to be saved."""
        self._records: dict[int, EvalRecord] = {}
        if evaluator is None:
            return
        evaluator.on_progress = view.rollout_progress
        if left_out := evaluator.eval_set.left_out:
            view.note(
                f"evaluation leaves out {len(left_out)} of {len(left_out) + len(evaluator.eval_set.groups)} prompts "
                f"that leave no room for an answer, the first one {left_out[0]}"
            )
        own = evaluator.fingerprint
        self._records = {r.step: r for r in read_records(run.folder) if r.fingerprint == own}
        best = self._best()
        if read_best(run.folder) != best:
            write_best(run.folder, best)

    def is_due(self, step: int) -> bool:
        e = self.config.eval
        if self.evaluator is None:
            return False
        if step == 0:
            return e.before_training
        return step == self.config.steps or bool(e.every and step % e.every == 0)

    def begin(self, step: int, log: MetricsLog) -> None:
        """Before the first step; and what a resumed run has not evaluated because it was stopped. The line of the step
        is in the log already, or it is step 0, which has a line for its evaluation alone."""
        if self.is_due(step):
            known = self._records.get(step)
            log.extend(step, eval_metrics(known.scores) if known else self._evaluate(step))

    def after(self, step: int, clock: Clock) -> dict[str, float]:
        """Metrics of the evaluation after a step, if one is due."""
        self.improved = False
        if not self.is_due(step):
            return {}
        with clock.part("testing"):
            return self._evaluate(step)

    def _evaluate(self, step: int) -> dict[str, float]:
        assert self.evaluator is not None
        self.view.rollout_started(step, len(self.evaluator.eval_set.requests()))
        result = self.evaluator.run(step, self._fail)
        record = EvalRecord.of(step, self.evaluator.fingerprint, result)
        write_eval_samples(self.run.folder, step, result, self.config.log.samples)
        write_record(self.run.folder, record)
        self._records[step] = record
        best = self._best()
        self.improved = best is not None and best.step == step
        if self.improved:
            write_best(self.run.folder, best)
        self._say(record)
        return eval_metrics(result.scores)

    def _fail(self, error: str) -> Exception:
        return self.saver.fix_and_resume(error, ", or count such answers with reward.on_error=value")

    def _best(self) -> BestCheckpoint | None:
        """The first of those with the highest value."""
        name = self.config.eval.best
        if name is None:
            return None
        values = {step: record.scores.value(name) for step, record in sorted(self._records.items())}
        values = {step: value for step, value in values.items() if value == value}  # not NaN
        if not values:
            return None
        step = max(values, key=values.__getitem__)
        return BestCheckpoint.at(step, name, values[step])

    def _say(self, record: EvalRecord) -> None:
        self.view.say(describe_record(record, self.improved))
        first = self._records[min(self._records)]
        if first is not record:
            self.view.say(describe_difference(compare_scores(record.scores, first.scores), f"since step {first.step}"))

    def close(self) -> None:
        if self.evaluator is not None:
            self.evaluator.close()
