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
    RUN/checkpoints/step-000010/     the policy in Hugging Face form, and what is needed to go on
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from paceline.cluster.coordinator import Assign, Order
from paceline.config import Config, build_config
from paceline.decisions import FILE as DECIDED
from paceline.decisions import compare, dump_decisions, read_decisions, reopen
from paceline.errors import RunError, UserError
from paceline.lock import LOCK, RunLock
from paceline.model.tokenizer import Tokenizer
from paceline.observe.metrics import append_line, cut_lines, read_lines

STATE = "state.json"
CONFIG = "config.yaml"
MADE_AT_START = (CONFIG, DECIDED, "timeline.json", "rewards.log", "workers.log", LOCK)


@dataclass
class Progress:
    """Where a run stands, beside the weights: all that is random is keyed, so this is all there is."""

    step: int = 0
    """Steps done."""
    cursor: int = 0
    """Prompts taken from the task."""
    bad_updates: int = 0
    """Updates in a row that were not finite."""
    tuner: dict[str, Any] | None = None
    """What the engine has learned about strategies."""
    drafter_version: int = 0
    """How often the run has published a drafter of its own."""
    backoff: dict[str, Any] | None = None
    """How often the drafter is trained."""
    metrics: dict[str, float] | None = None
    """Of the last step, as far as they were known when it was saved: a kill may come before they are logged."""


class Run:
    def __init__(self, folder: Path, config: Config):
        self.folder, self.config = folder, config
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
            run._found = {path.name for path in folder.iterdir()} if config.run_dir and folder.exists() else None
            folder.mkdir(parents=True, exist_ok=True)
            run.lock()
            if (folder / CONFIG).exists():
                run.unlock()
                raise UserError(
                    f"{folder} holds a run already; go on with it by `paceline train --resume {folder}`, "
                    "or name another run_dir"
                )
            run.checkpoints.mkdir(exist_ok=True)
            _write_aside(folder / CONFIG, _dump(run.config))
        except OSError as err:
            raise UserError(f"the run directory {folder} cannot be written: {err.strerror}") from err
        return run

    @classmethod
    def open(cls, folder: Path) -> Run:
        file = folder / CONFIG
        if not file.is_file():
            raise UserError(f"{folder} is not a run directory: it has no config.yaml")
        config = build_config(yaml.safe_load(file.read_text()), where=str(file))
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
                _write_aside(self.folder / CONFIG, _dump(reopen(decided, made, kept)))
                _write_aside(self.folder / DECIDED, dump_decisions(made))
            _write_aside(self.folder / CONFIG, _dump(decided))
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
        found = sorted(self.checkpoints.glob("step-*")) if self.checkpoints.is_dir() else []
        return found[-1] if found else None

    def save(self, write: Callable[[Path], dict[str, Any]], tokenizer: Tokenizer, progress: Progress) -> Path:
        """Write a checkpoint aside, then rename it into place and let go of the oldest. `write` puts weights and the
        learner's state into a folder, and returns what the tuner knows."""
        target = self.checkpoints / f"step-{progress.step:06d}"
        aside = self.checkpoints / f".partial-{os.getpid()}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            progress.tuner = write(aside)
            tokenizer.save(aside)
            (aside / STATE).write_text(json.dumps(asdict(progress)) + "\n")
            _sync(aside)
            if target.exists():  # written before by the same steps: a rename cannot replace a full directory
                target.rename(self.checkpoints / f".old-{os.getpid()}")
            aside.rename(target)
        except (OSError, SafetensorError) as err:
            raise self._disk_error(err, "a checkpoint") from err
        for old in [
            *self.checkpoints.glob(".old-*"),
            *sorted(self.checkpoints.glob("step-*"))[: -self.config.checkpoint.keep],
        ]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def restore(self) -> Progress:
        """Where the newest checkpoint stands; what was logged after it is forgotten."""
        newest = self.newest_checkpoint()
        progress = Progress()
        if newest is not None:
            try:
                progress = Progress(**json.loads((newest / STATE).read_text()))
            except (OSError, TypeError, ValueError) as err:
                raise UserError(
                    f"the checkpoint {newest} cannot be read: {err}; remove it to go on from an older one"
                ) from err
        for stale in self.checkpoints.glob(".*-*"):
            shutil.rmtree(stale, ignore_errors=True)
        for name in ("metrics.jsonl", "samples.jsonl", "answers.jsonl", "decisions.jsonl"):
            cut_lines(self.folder / name, progress.step)
        logged = read_lines(self.folder / "metrics.jsonl")
        if progress.metrics and (not logged or logged[-1]["step"] < progress.step):
            append_line(self.folder / "metrics.jsonl", {"step": progress.step} | progress.metrics)
        return progress

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

    def _disk_error(self, err: Exception, what: str) -> RunError:
        newest = self.newest_checkpoint()
        kept = f"the last checkpoint, {newest}, is intact" if newest else "there is no checkpoint yet"
        return RunError(
            f"{what} could not be written to {self.folder} ({err}); {kept}; "
            f"make room and go on with: paceline train --resume {self.folder}"
        )

    def disk_error(self, err: OSError) -> RunError:
        return self._disk_error(err, "the log")


def _fresh(parent: Path, task: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
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


def _write_aside(file: Path, text: str) -> None:
    aside = file.with_name(f".{file.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)


def _sync(folder: Path) -> None:
    """On disk before the rename, so that a name never promises what a power cut has taken."""
    for file in (path for path in folder.rglob("*") if path.is_file()):
        with open(file, "rb") as f:
            os.fsync(f.fileno())
