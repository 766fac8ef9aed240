"""A run is a directory: resolved config, metrics, samples, checkpoints. Everything is written so that a kill at any
moment leaves it usable: whole files are written aside and renamed, lines are appended.

    RUN/config.yaml                  the resolved settings
    RUN/decided.yaml                 which of them were left open, and were decided
    RUN/metrics.jsonl                one line per step
    RUN/samples.jsonl                some answers of each step
    RUN/answers.jsonl                length, reward and worker of every answer
    RUN/decisions.jsonl              which worker was told to decode, to give, to train or to stop, and why
    RUN/timeline.json                what every worker did when, as a Chrome trace
    RUN/report.html                  all of it as a page
    RUN/tensorboard/
    RUN/rewards.log                  what reward functions printed
    RUN/workers.log                  what workers printed, where they are processes of their own
    RUN/errors.log                   tracebacks of what went wrong
    RUN/checkpoints/step-000010/     the policy in Hugging Face form, and what is needed to go on
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, Field
from safetensors import SafetensorError

from paceline.cluster.coordinator import Assign, Order
from paceline.config import Config, build_config, read_settings
from paceline.draft.tuner_state import TunerState
from paceline.errors import RunError, UserError
from paceline.files import reading
from paceline.files.lock import LOCK, RunLock
from paceline.files.writing import open_to_append, remove_unfinished, write_aside
from paceline.model.tokenizer import Tokenizer
from paceline.observe.metrics import append_line, cut_lines, read_lines, read_rows, without_nan
from paceline.setup.decisions import FILE as DECIDED
from paceline.setup.decisions import compare, dump_decisions, read_decisions, reopen
from paceline.spot.backoff import BackoffState

STATE = "state.json"
LOGS = ("metrics.jsonl", "samples.jsonl", "answers.jsonl", "decisions.jsonl")
CHECKPOINT = re.compile(r"step-([0-9]{1,18})")
OLD = re.compile(r"\.old-(step-[0-9]{1,18})")
"""A checkpoint while the one that replaces it takes its name."""
PARTIAL = re.compile(r"\.partial-[0-9]+")
"""A checkpoint that is being written."""
Count = Annotated[int, Field(strict=True, ge=0, le=2**62)]
CONFIG = "config.yaml"
MADE_AT_START = (CONFIG, DECIDED, "timeline.json", "rewards.log", "workers.log", "errors.log", LOCK)


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
    """What the engine has learned about strategies."""
    drafter_version: Count = 0
    """How often the run has published a drafter of its own."""
    backoff: dict[str, Any] | None = None
    """How often the drafter is trained."""
    metrics: dict[str, Annotated[float, Field(strict=True)]] | None = None
    """Of the last step, as far as they were known when it was saved: a kill may come before they are logged."""


class Run:
    def __init__(self, folder: Path, config: Config):
        self.folder = folder
        self.config = config
        self.checkpoints = folder / "checkpoints"
        self._lock: RunLock | None = None
        self._found: set[str] | None = set()  # what the directory held before; None if it was made for the run

    @classmethod
    def create(cls, config: Config) -> Run:
        """A new one, locked."""
        task = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.task.name).stem or "run")
        folder = Path(config.run_dir or "runs")
        try:
            folder = folder if config.run_dir else _fresh(folder, task)
            run = cls(folder, config.model_copy(update={"run_dir": str(folder)}))
            run._found = set(os.listdir(folder)) if config.run_dir and os.path.lexists(folder) else None
            folder.mkdir(parents=True, exist_ok=True)
            run.lock()
            if problem := run._taken():
                if LOCK not in (run._found or ()):
                    (folder / LOCK).unlink(missing_ok=True)  # while it is held: whoever waits for it looks again
                run.unlock()
                raise UserError(problem)
            run.checkpoints.mkdir(exist_ok=True)
            write_aside(folder / CONFIG, _dump(run.config))
        except OSError as err:
            shown = reading.shorten(str(folder), 200)
            raise UserError(f"the run directory {shown} cannot be written: {err.strerror}") from err
        return run

    def _taken(self) -> str | None:
        """Why no run can begin here, if none can: nothing of another one is written over."""
        if os.path.lexists(self.folder / CONFIG):
            return (
                f"{self.folder} holds a run already; go on with it by `paceline train --resume {self.folder}`, "
                "or name another run_dir"
            )
        left = [name for name in (*LOGS, "timeline.json") if name in (self._found or ())]
        left = left or [path.name for path in self._by_step()]
        if left:
            return f"{self.folder} has no config.yaml, but {left[0]} of another run; name another run_dir"
        return None

    @classmethod
    def open(cls, folder: Path) -> Run:
        if not os.path.isfile(folder / CONFIG):  # which says no of names that no file can have
            raise UserError(f"{reading.shorten(str(folder), 200)} is not a run directory: it has no config.yaml")
        file = reading.inside(folder, CONFIG)
        settings = read_settings(file)
        if missing := [name for name in Config.model_fields if name not in settings]:
            # Half a file would be a valid one, and the run would go on with other settings than its own.
            raise UserError(f"{file} is not whole: it has no '{missing[0]}'; bring back what the run was started with")
        config = build_config(settings, where=str(file))
        return cls(folder, config.model_copy(update={"run_dir": str(folder)}))

    def lock(self) -> str | None:
        """Keep other processes out until `unlock` or the end of this one -> a warning, where the disk cannot."""
        if self._lock is None:
            self._lock = RunLock(self.folder)
        return self._lock.warning

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def given(self, config: Config | None = None, keep: Collection[str] = ()) -> Config:
        """The settings with all that was decided open again, but for some keys."""
        return reopen(config or self.config, read_decisions(self.folder), keep)

    def write_config(self, given: Config, decided: Config, kept: Collection[str]) -> None:
        """Replace the settings by those that leave nothing open. Wherever a kill comes in between, what is found then
        is open or known to be decided, and never a decision that looks as if it had been given."""
        made = compare(given, decided)
        try:
            if read_decisions(self.folder) != made:
                write_aside(self.folder / CONFIG, _dump(reopen(decided, made, kept)))
                write_aside(self.folder / DECIDED, dump_decisions(made))
            write_aside(self.folder / CONFIG, _dump(decided))
        except OSError as err:
            raise UserError(f"the run directory {self.folder} cannot be written: {err.strerror}") from err

    def discard(self) -> None:
        """Remove what was made, and nothing else, unless another process has taken it over."""
        try:
            self.lock()
        except UserError:
            return
        if self._found is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            for name in set(MADE_AT_START) - self._found:
                (self.folder / name).unlink(missing_ok=True)
            if self.checkpoints.name not in self._found and not any(self.checkpoints.iterdir()):
                self.checkpoints.rmdir()
        self.unlock()

    def newest_checkpoint(self) -> Path | None:
        """The newest complete one. Only complete ones have their name: see `save`."""
        found = self._by_step()
        if not found:
            return None
        if not _is_folder(found[-1]):
            raise UserError(
                f"the checkpoint {found[-1]} is not a folder of the run; remove it to go on from an older one"
            )
        return found[-1]

    def _by_step(self) -> list[Path]:
        """All that is called as checkpoints are, the oldest first: by number, since step-1000000 comes before
        step-999999 in the alphabet."""
        if self.checkpoints.is_symlink():
            raise UserError(f"{self.checkpoints} is a link; a run has its checkpoints in a folder of its own")
        try:
            names = sorted(os.listdir(self.checkpoints))
        except FileNotFoundError:
            return []
        except OSError as err:
            raise UserError(f"the checkpoints at {self.checkpoints} cannot be read: {err.strerror}") from err
        found = [(int(match[1]), name) for name in names if (match := CHECKPOINT.fullmatch(name))]
        return [self.checkpoints / name for _, name in sorted(found)]

    def save(self, write: Callable[[Path], dict[str, Any]], tokenizer: Tokenizer, progress: Progress) -> Path:
        """Write a checkpoint aside, then rename it into place and let go of the oldest. `write` puts weights and the
        learner's state into a folder, and returns what the tuner knows."""
        target = self.checkpoints / f"step-{progress.step:06d}"
        aside = self.checkpoints / f".partial-{os.getpid()}"
        old = self.checkpoints / f".old-{target.name}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            progress.tuner = write(aside)
            tokenizer.save(aside)
            state = json.dumps(without_nan(asdict(progress)), allow_nan=False)
            (aside / STATE).write_text(state + "\n", encoding="utf-8")
            _sync(aside)
            if os.path.lexists(target):  # written before by the same steps: a rename cannot replace a full directory
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            aside.rename(target)
        except (OSError, SafetensorError) as err:
            raise self._disk_error(err, "a checkpoint") from err
        # Never anything that is not a checkpoint, whatever it is called.
        kept = [folder for folder in self._by_step() if _is_folder(folder) and (folder / STATE).is_file()]
        for folder in [old, *kept[: -self.config.checkpoint.keep]]:
            shutil.rmtree(folder, ignore_errors=True)
        return target

    def restore(self) -> Progress:
        """Where the newest checkpoint stands; what was logged after it is forgotten. Everything is read before anything
        is changed."""
        self._by_step()  # which says what is wrong with the folder as a whole
        self._recover()
        newest = self.newest_checkpoint()
        progress = _read_progress(newest) if newest is not None else Progress()
        read_lines(self.folder / "metrics.jsonl")
        for name in LOGS:
            for _ in read_rows(self.folder / name):  # raises where a line is damaged
                pass
        try:
            for name in LOGS:
                cut_lines(self.folder / name, progress.step)
            logged = read_lines(self.folder / "metrics.jsonl")
            if progress.metrics and (not logged or logged[-1]["step"] < progress.step):
                append_line(self.folder / "metrics.jsonl", {"step": progress.step} | progress.metrics)
            remove_unfinished(self.folder)
        except OSError as err:
            raise UserError(f"the run directory {self.folder} cannot be written: {err.strerror}") from err
        return progress

    def _recover(self) -> None:
        """After a kill: a checkpoint that had to make way for one that never came gets its name back, and what was not
        whole is removed."""
        try:
            for path in sorted(self.checkpoints.iterdir()) if self.checkpoints.is_dir() else []:
                match = OLD.fullmatch(path.name)
                if not _is_folder(path):
                    continue
                if match and not os.path.lexists(self.checkpoints / match[1]):
                    path.rename(self.checkpoints / match[1])
                elif match or PARTIAL.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)
        except OSError as err:
            raise UserError(f"the checkpoints at {self.checkpoints} cannot be read: {err.strerror}") from err

    def write_samples(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            append_line(self.folder / "samples.jsonl", row)

    def write_answers(self, row: dict[str, Any]) -> None:
        append_line(self.folder / "answers.jsonl", row)

    def write_decisions(self, step: int, decisions: list[tuple[float, Order]]) -> None:
        """Who was told to do what in a rollout, when and why."""
        for at, order in decisions:
            what = {"step": step, "at": round(at, 3), "worker": order.worker, "order": type(order).__name__.lower()}
            count = {"requests": len(order.requests)} if isinstance(order, Assign) else {}
            append_line(self.folder / "decisions.jsonl", what | count | {"reason": order.reason})

    def write_error(self, where: str, trace: str) -> Path:
        """Keep a traceback, which the sentence on the terminal does not show -> the file."""
        file = self.folder / "errors.log"
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with os.fdopen(open_to_append(file), "a", encoding="utf-8", errors="backslashreplace") as out:
            out.write(f"{stamp}  {where}\n{trace.rstrip()}\n\n")
        return file

    def _disk_error(self, err: Exception, what: str) -> RunError:
        found = self._by_step()
        newest = found[-1] if found else None
        kept = f"the last checkpoint, {newest}, is intact" if newest else "there is no checkpoint yet"
        return RunError(
            f"{what} could not be written to {self.folder} ({err}); {kept}; "
            f"make room and go on with: paceline train --resume {self.folder}"
        )

    def disk_error(self, err: OSError) -> RunError:
        return self._disk_error(err, "the log")


def _fresh(parent: Path, task: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    task = task[:80]  # a name has bounds
    folder, n = parent / f"{task}-{stamp}", 1
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            folder.mkdir()  # of two that begin in the same second, one gets the name
            return folder
        except FileExistsError:
            n += 1
            folder = parent / f"{task}-{stamp}-{n}"


def _dump(config: Config) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read_progress(checkpoint: Path) -> Progress:
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
        if checkpoint.name != f"step-{progress.step:06d}":
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
