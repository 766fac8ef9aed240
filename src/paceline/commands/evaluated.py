"""What `paceline eval` evaluates: a model, or a checkpoint of a run, with the settings that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.devices import choose_workers
from paceline.config import Config, change_settings, load_config, read_overrides
from paceline.draft.eagle.files import DRAFTER
from paceline.errors import UserError
from paceline.files.reading import named_path
from paceline.learn.algorithms import resolve
from paceline.run import Run
from paceline.run.best import read_best
from paceline.run.checkpoints import by_step, checkpoint_name

NEWEST = "newest"
BEST_NAME = "best"


@dataclass(frozen=True)
class ModelToEvaluate:
    label: str
    path: str
    """Of the policy."""
    step: int
    """Of the run; 0 for what is no checkpoint."""
    config: Config


def find_models(
    what: str, checkpoint: str | None, against: Sequence[str], settings: Sequence[str]
) -> list[ModelToEvaluate]:
    """`what` is a run, a checkpoint of one, a model's folder, a hub id or `embedded`; `against` are further ones, or
    checkpoints of the same run by their number. All are evaluated as the first one's settings and `settings` say."""
    run = _run_at(what)
    if run is None and checkpoint is not None:
        raise UserError(f"--checkpoint chooses one of a run's, but {what} is not a run")
    base = _settings_of(run, what, settings)
    if base.eval.task is None:
        raise UserError("nothing to evaluate on: name a task with --task, for example --task data.jsonl")
    first = _of_run(run, checkpoint or _named(what, run), base) if run else _model(what, base)
    models = [first]
    for other in against:
        models.append(_find_other(other, run, base))
    labels = [model.label for model in models]
    if len(set(labels)) < len(labels):
        raise UserError(f"{', '.join(labels)} name the same model more than once, so there is nothing to compare")
    return models


def _find_other(name: str, run: Run | None, base: Config) -> ModelToEvaluate:
    if run is not None and (name in (NEWEST, BEST_NAME) or name.isdecimal()):
        return _of_run(run, name, base)
    other = _run_at(name)
    return _of_run(other, _named(name, other), base, prefix=f"{other.folder.name} ") if other else _model(name, base)


def _run_at(what: str) -> Run | None:
    """The run that a folder is, or is a checkpoint of."""
    if what == "embedded":
        return None
    path = named_path(what)
    if (path / "config.yaml").is_file():
        return Run.open(path)
    parent = path.resolve().parent
    if parent.name == "checkpoints" and (parent.parent / "config.yaml").is_file() and path.name.startswith("step-"):
        return Run.open(parent.parent)
    return None


def _named(what: str, run: Run) -> str:
    """The checkpoint that the words name themselves, or else the newest."""
    name = named_path(what).name
    return name.removeprefix("step-") if run.folder.resolve() != named_path(what).resolve() else NEWEST


def _settings_of(run: Run | None, what: str, settings: Sequence[str]) -> Config:
    if run is None:
        return load_config(None, [f"model.path={what}", *settings])
    # What was decided for the machine of the run need not hold on this one.
    return change_settings(run.given(), read_overrides(settings), "the command line")[0]


def _of_run(run: Run, which: str, base: Config, prefix: str = "") -> ModelToEvaluate:
    step = _step_of(run, which)
    label = f"{prefix}step {step}"
    if step == 0:
        return _prepared(label, run.config.model.path, 0, base, _frozen_drafter(run))
    folder = run.checkpoints / checkpoint_name(step)
    if not folder.is_dir():
        there = ", ".join(str(int(path.name.removeprefix("step-"))) for path in by_step(run.checkpoints))
        raise UserError(f"{run.folder} has no checkpoint of step {step}; there are: {there or 'none'}")
    trained = (folder / DRAFTER / "config.json").is_file()
    return _prepared(label, str(folder), step, base, str(folder / DRAFTER) if trained else _frozen_drafter(run))


def _frozen_drafter(run: Run) -> str:
    """The drafter that the run began with, if it is still there: it only makes an evaluation faster."""
    named = run.config.speculation.drafter
    return named if named not in (None, "new", "auto", "none") and Path(named).is_dir() else "none"


def _step_of(run: Run, which: str) -> int:
    if which == BEST_NAME:
        best = read_best(run.folder)
        if best is None:
            raise UserError(f"{run.folder} has no best checkpoint: it was not evaluated while it ran (eval.task)")
        return best.step
    if which == NEWEST:
        newest = run.newest_checkpoint()
        if newest is None:
            raise UserError(f"the run {run.folder} has no checkpoint yet, so there is nothing to evaluate")
        return int(newest.name.removeprefix("step-"))
    number = which.removeprefix("step-")
    if not (number.isascii() and number.isdecimal()):
        raise UserError(f"'{which}' is no checkpoint: give {NEWEST}, {BEST_NAME}, or the number of a step")
    return int(number)


def _model(what: str, base: Config) -> ModelToEvaluate:
    return _prepared(what, what, 0, base, "auto")


def _prepared(label: str, path: str, step: int, base: Config, drafter: str | None) -> ModelToEvaluate:
    """With settings under which it is evaluated: no training of anything."""
    changes: dict[str, dict[str, Any]] = {
        "model": {"path": path if path == "embedded" or not Path(path).is_dir() else str(Path(path).resolve())},
        "speculation": {"drafter": drafter if base.speculation.mode == "adaptive" else "none"},
        "spot": {"when": "off"},
        "learn": {"kl_coef": 0.0},
    }
    sections = {name: getattr(base, name).model_copy(update=values) for name, values in changes.items()}
    return ModelToEvaluate(label, path, step, choose_workers(resolve(base.model_copy(update=sections))))
