"""`paceline eval`: one checkpoint evaluated, or several on equal dice."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.commands.evaluated import ModelToEvaluate, find_models
from paceline.errors import RunError, UserError
from paceline.evaluation.evaluator import Evaluator
from paceline.evaluation.metrics import eval_metrics
from paceline.evaluation.paired import PairedDifference, compare_scores, standard_error
from paceline.evaluation.records import EvalRecord
from paceline.evaluation.scores import MEAN, EvalScores
from paceline.evaluation.standalone import evaluating
from paceline.files.writing import write_aside
from paceline.observe.metrics import without_nan
from paceline.process.stopping import Stopping


@dataclass(frozen=True)
class EvalOutcome:
    model: ModelToEvaluate
    record: EvalRecord
    accept_length: float
    tokens_per_second: float
    left_out: int
    """Prompts that the model has no room for."""


def eval_command(
    what: str,
    checkpoint: str | None,
    against: Sequence[str],
    settings: Sequence[str],
    console: Console,
    as_json: bool,
    out: Path | None,
) -> None:
    models = find_models(what, checkpoint, against, settings)
    outcomes: list[EvalOutcome] = []
    for model in models:
        if not as_json:
            console.print(f"evaluating {model.label}", soft_wrap=True, markup=False)
        outcomes.append(evaluate(model, console, quiet=as_json))
    _check_same_prompts(outcomes)
    differences = {
        other.model.label: [
            compare_scores(outcomes[0].record.scores, other.record.scores, name)
            for name in _different_numbers(outcomes)
        ]
        for other in outcomes[1:]
    }
    result = as_result(outcomes, differences)
    if out is not None:
        try:
            write_aside(out, json.dumps(result, indent=2) + "\n")
        except OSError as err:
            raise UserError(f"{out} cannot be written: {err.strerror}") from err
    if as_json:
        print(json.dumps(result))
        return
    console.print(result_table(outcomes))
    for other, several in zip(outcomes[1:], differences.values(), strict=True):
        dice = (
            "equal dice" if _equal_dice(outcomes[0], other) else "the same prompts, but not equal dice: tokens differ"
        )
        title = f"\n{outcomes[0].model.label} minus {other.model.label}, on {dice}"
        console.print(title, soft_wrap=True, markup=False)
        console.print(difference_table(several))


def evaluate(model: ModelToEvaluate, console: Console, quiet: bool) -> EvalOutcome:
    """On workers that end with it. What they and rewards have printed stays if something goes wrong."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-eval-"))
    note = (lambda text: None) if quiet else (lambda text: console.print(f"note {text}", soft_wrap=True, markup=False))
    try:
        with evaluating(model.config, folder, Stopping(), note) as evaluator:
            _say_left_out(evaluator)
            result = evaluator.run(model.step, UserError)
            record = EvalRecord.of(model.step, evaluator.fingerprint, result)
            left_out = len(evaluator.eval_set.left_out)
    except RunError as err:
        raise RunError(f"{err}; logs of the evaluation are in {folder}") from err
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # the sentence says all
        raise
    shutil.rmtree(folder, ignore_errors=True)
    speed = record.tokens / max(result.seconds, 1e-9)
    return EvalOutcome(model, record, result.stats.accept_length, speed, left_out)


def _say_left_out(evaluator: Evaluator) -> None:
    if left_out := evaluator.eval_set.left_out:
        evaluator.note(f"{len(left_out)} prompts leave no room for an answer and are left out, first {left_out[0]}")


def _check_same_prompts(outcomes: Sequence[EvalOutcome]) -> None:
    """Models that were not given the same prompts cannot be compared prompt by prompt. Where the tokens of prompts
    differ, but not the prompts, they can; their dice are not equal then."""
    first = outcomes[0]
    for other in outcomes[1:]:
        if not _equal_dice(first, other) and (first.left_out or other.left_out):
            raise UserError(
                f"{first.model.label} and {other.model.label} do not have room for the same prompts, so they cannot be "
                "compared prompt by prompt; evaluate each by itself, or leave out the longest prompts of the data set"
            )


def _equal_dice(a: EvalOutcome, b: EvalOutcome) -> bool:
    return a.record.fingerprint == b.record.fingerprint


def as_result(outcomes: Sequence[EvalOutcome], differences: dict[str, list[PairedDifference]]) -> dict[str, Any]:
    """All of it as JSON, with the reward of every answer."""
    models = []
    for o in outcomes:
        row = o.record.as_json()
        row |= {"model": o.model.label, "path": o.model.path, "metrics": eval_metrics(o.record.scores)}
        row |= {"accept_length": o.accept_length, "tokens_per_second": o.tokens_per_second}
        models.append(row)
    compared = {label: [d.as_json() for d in several] for label, several in differences.items()}
    result: dict[str, Any] = without_nan({"models": models, "differences": compared})
    return result


def result_table(outcomes: Sequence[EvalOutcome]) -> Table:
    """A column per model, a row per number."""
    table = Table("", *(o.model.label for o in outcomes), box=None, padding=(0, 2, 0, 0))
    for name in _different_numbers(outcomes):
        cells = [_with_error(o.record.scores, name) for o in outcomes]
        table.add_row("reward" if name == MEAN else name, *cells)
    table.add_row("length", *(f"{o.record.scores.mean_length:.0f} tokens" for o in outcomes))
    table.add_row("cut at the limit", *(f"{o.record.scores.clip_ratio:.1%}" for o in outcomes))
    table.add_row("prompts", *(f"{len(o.record.scores.prompts)} x {o.record.scores.samples}" for o in outcomes))
    table.add_row("seconds", *(f"{o.record.seconds:.1f}, {o.tokens_per_second:,.0f} tokens/s" for o in outcomes))
    return table


def _different_numbers(outcomes: Sequence[EvalOutcome]) -> list[str]:
    """Names of the numbers, but for those that are the same as one before: with a single reward of 0 or 1 per answer
    the mean is pass@1 and the function's own, and the best of k is pass@k."""
    shown: dict[tuple[float, ...], str] = {}
    for name in outcomes[0].record.scores.names():
        values = tuple(value for o in outcomes for value in o.record.scores.per_prompt(name))
        shown.setdefault(values, name)
    return list(shown.values())


def _with_error(scores: EvalScores, name: str) -> str:
    se = standard_error(scores.per_prompt(name))
    return f"{scores.value(name):.4f} ± {se:.4f}" if math.isfinite(se) else f"{scores.value(name):.4f}"


def difference_table(several: Sequence[PairedDifference]) -> Table:
    table = Table("", "difference", "95 % interval", "unpaired", "changed", box=None, padding=(0, 2, 0, 0))
    for d in several:
        table.add_row(
            "reward" if d.name == MEAN else d.name,
            f"{d.difference:+.4f} ± {d.se:.4f}",
            f"{d.low:+.4f} to {d.high:+.4f}",
            f"± {d.se_unpaired:.4f}",
            f"{d.changed} of {d.prompts} prompts",
        )
    return table
