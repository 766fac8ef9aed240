"""Checkpoints of a run: written aside and renamed into place, so that a kill at any moment leaves the newest whole."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from paceline.draft.tuner_state import TunerState
from paceline.errors import UserError
from paceline.files import reading
from paceline.model.tokenizer import Tokenizer
from paceline.observe.metrics import without_nan
from paceline.spot.backoff import BackoffState
from paceline.spot.investment import CurveState

STATE = "state.json"
NAME = re.compile(r"step-([0-9]{1,18})")
OLD = re.compile(r"\.old-(step-[0-9]{1,18})")
"""A checkpoint while the one that replaces it takes its name."""
PARTIAL = re.compile(r"\.partial-[0-9]+")
"""A checkpoint that is being written."""
Count = Annotated[int, Field(strict=True, ge=0, le=2**62)]


@dataclass
class Progress:
    """Where a run stands, beside the weights: all that is random is keyed, so this is all there is."""

    # What a newer version has added is refused: to go on without it would be to lose it.
    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Count = 0
    """Steps done."""
    cursor: Annotated[int, Field(strict=True, ge=0, le=2**40)] = 0
    """Prompts taken from the task."""
    bad_updates: Count = 0
    """Updates in a row that were not finite."""
    tuner: dict[str, Any] | None = None
    """What the engine has measured of strategies."""
    drafter_version: Count = 0
    """How often the run has published a drafter of its own."""
    backoff: dict[str, Any] | None = None
    """How often the drafter is trained."""
    investment: dict[str, Any] | None = None
    """What is known of training the drafter as an investment."""
    metrics: dict[str, Annotated[float, Field(strict=True)]] | None = None
    """Of the last step, as far as they were known when it was saved: a kill may come before they are logged."""


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def newest(folder: Path) -> Path | None:
    """The newest complete one. Only complete ones have their name: see `save`."""
    found = by_step(folder)
    if not found:
        return None
    if not _is_folder(found[-1]):
        raise UserError(f"the checkpoint {found[-1]} is not a folder of the run; remove it to go on from an older one")
    return found[-1]


def by_step(folder: Path) -> list[Path]:
    """All that is called as checkpoints are, the oldest first: by number, since step-1000000 comes before step-999999
    in the alphabet."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a link; a run has its checkpoints in a folder of its own")
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as err:
        raise UserError(f"the checkpoints at {folder} cannot be read: {err.strerror}") from err
    found = [(int(match[1]), name) for name in names if (match := NAME.fullmatch(name))]
    return [folder / name for _, name in sorted(found)]


def save(
    folder: Path,
    write: Callable[[Path], dict[str, Any]],
    tokenizer: Tokenizer,
    progress: Progress,
    keep: int,
    spared: Collection[str] = (),
) -> Path:
    """Write a checkpoint aside, rename it into place and delete all but the newest `keep` and those that are `spared`,
    by their names. `write` puts weights and the learner's state into a folder, and returns the tuner's."""
    target = folder / checkpoint_name(progress.step)
    aside = folder / f".partial-{os.getpid()}"
    old = folder / f".old-{target.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    progress.tuner = write(aside) or None  # an engine may keep it elsewhere
    tokenizer.save(aside)
    state = json.dumps(without_nan(asdict(progress)), allow_nan=False)
    (aside / STATE).write_text(state + "\n", encoding="utf-8")
    _sync(aside)
    if os.path.lexists(target):  # written before by the same steps: a rename cannot replace a full directory
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    aside.rename(target)
    # Never anything that is not a checkpoint, whatever it is called.
    found = [path for path in by_step(folder) if _is_folder(path) and (path / STATE).is_file()]
    for path in [old, *(path for path in found[:-keep] if path.name not in spared)]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def recover(folder: Path) -> None:
    """After a kill: a checkpoint that had to make way for one that never came gets its name back, and what was not
    whole is removed."""
    try:
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            match = OLD.fullmatch(path.name)
            if not _is_folder(path):
                continue
            if match and not os.path.lexists(folder / match[1]):
                path.rename(folder / match[1])
            elif match or PARTIAL.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
    except OSError as err:
        raise UserError(f"the checkpoints at {folder} cannot be read: {err.strerror}") from err


def read_progress(checkpoint: Path) -> Progress:
    """What a checkpoint says of itself."""
    try:
        file = reading.inside(checkpoint, STATE)
        values = reading.read_object(file)
        if isinstance(values.get("metrics"), dict):  # null is how JSON says that a number was not finite
            values["metrics"] = {name: math.nan if v is None else v for name, v in values["metrics"].items()}
        progress = reading.check(Progress, values, str(file))
        if progress.tuner is not None:
            reading.check(TunerState, progress.tuner, f"'tuner' of {file}")
        if progress.backoff is not None:
            reading.check(BackoffState, progress.backoff, f"'backoff' of {file}")
        if progress.investment is not None:
            reading.check(CurveState, progress.investment, f"'investment' of {file}")
        if checkpoint.name != checkpoint_name(progress.step):
            raise UserError(f"{file} is of step {progress.step}")
    except UserError as err:
        raise UserError(
            f"the checkpoint {checkpoint} cannot be read: {err}; remove it to go on from an older one"
        ) from err
    return progress


def _is_folder(path: Path) -> bool:
    """Itself, not what a link leads to."""
    return path.is_dir() and not path.is_symlink()


def _sync(folder: Path) -> None:
    """On disk before the rename, so that a name never promises what a power cut has taken."""
    for file in (path for path in folder.rglob("*") if path.is_file()):
        with open(file, "rb") as f:
            os.fsync(f.fileno())
