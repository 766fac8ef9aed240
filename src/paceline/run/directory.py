"""A run is a directory: resolved config, metrics, samples, checkpoints. Everything is written so that a kill at any
moment leaves it usable: whole files are written aside and renamed, lines are appended.

    RUN/config.yaml                  the resolved settings
    RUN/decided.yaml                 which of them were left open, and were decided
    RUN/changes.jsonl                which of them were changed when the run was resumed, and after which step
    RUN/sources.json, RUN/sources/   hashes of data and reward files, and copies of the latter
    RUN/metrics.jsonl                one line per step
    RUN/samples.jsonl                some completions of each step
    RUN/answers.jsonl                length, reward and worker of every completion
    RUN/turns.jsonl                  what environments and tools returned
    RUN/decisions.jsonl              orders to workers: assign, release, train or stop, and why
    RUN/evaluations.jsonl            the reward of every answer of each evaluation
    RUN/evaluation_samples.jsonl     some of those answers
    RUN/best.json                    which checkpoint is the best one by evaluation
    RUN/timeline.json                what every worker did when, as a Chrome trace
    RUN/report.html                  all of it as a page
    RUN/tensorboard/
    RUN/rewards.log                  what reward functions printed
    RUN/workers.log                  what workers printed, where they are processes of their own
    RUN/errors.log                   tracebacks of what went wrong
    RUN/end.json                     why it stopped, if it did not finish and was not killed
    RUN/checkpoints/step-000010/     the policy in Hugging Face form, and what is needed to resume
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from paceline.cluster.coordinator import Assign, Order, WriteAhead
from paceline.config import Config, build_config, read_settings
from paceline.errors import RunError, UserError
from paceline.files import reading
from paceline.files.lock import LOCK, RunLock
from paceline.files.writing import open_to_append, remove_unfinished, write_aside
from paceline.model.tokenizer import Tokenizer
from paceline.observe.metrics import append_line, cut_lines, read_lines, read_rows
from paceline.run import checkpoints
from paceline.run.best import read_best
from paceline.run.changes import CHANGES, Changes, change_run
from paceline.run.checkpoints import Progress, checkpoint_name
from paceline.run.sources import COPIES, INDEX, with_absolute_paths
from paceline.setup.decisions import FILE as DECIDED
from paceline.setup.decisions import compare, dump_decisions, read_decisions, reopen

LOGS = (
    "metrics.jsonl", "samples.jsonl", "answers.jsonl", "decisions.jsonl",
    "evaluations.jsonl", "evaluation_samples.jsonl",
)  # fmt: skip
CONFIG = "config.yaml"
ADDED = ("eval", "environment")  # sections that runs of earlier versions do not have
MADE_AT_START = (CONFIG, DECIDED, CHANGES, INDEX, "timeline.json", "rewards.log", "workers.log", "errors.log", LOCK)


class Run:
    def __init__(self, folder: Path, config: Config):
        self.folder = folder
        self.config = config
        self.checkpoints = folder / "checkpoints"
        self.changes: Changes = {}
        """What is different since the run is resumed."""
        self._renewed: Collection[str] = ()  # settings that were named when it was resumed: they count as given
        self._lock: RunLock | None = None
        self._found: set[str] | None = set()  # what the directory held before; None if it was made for the run
        self._parents: list[Path] = []  # that were made for it, the innermost first

    @classmethod
    def create(cls, config: Config) -> Run:
        """A new one, locked."""
        config = with_absolute_paths(config)
        task = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.task.name).stem).strip("-") or "run"
        folder = Path(config.run_dir or "runs")
        try:
            above = folder.parents if config.run_dir else (folder, *folder.parents)
            missing = [parent for parent in above if not os.path.lexists(parent)]
            folder = folder if config.run_dir else _fresh(folder, task)
            run = cls(folder, config.model_copy(update={"run_dir": str(folder)}))
            run._parents = missing
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
            return f"{self.folder} holds a run already; resume it with `{self.resume_command}`, or name another run_dir"
        left = [name for name in (*LOGS, "timeline.json") if name in (self._found or ())]
        left = left or [path.name for path in checkpoints.by_step(self.checkpoints)]
        if left:
            return f"{self.folder} has no config.yaml, but {left[0]} of another run; name another run_dir"
        return None

    @classmethod
    def open(cls, folder: Path, settings: Iterable[tuple[str, Any]] = (), where: str = "the settings") -> Run:
        """One that is there, with some settings changed; it is written that they are when the run has been resumed."""
        if not os.path.isfile(folder / CONFIG):  # which says no of names that no file can have
            raise UserError(f"{reading.shorten(str(folder), 200)} is not a run directory: it has no config.yaml")
        file = reading.inside(folder, CONFIG)
        values = read_settings(file)
        if missing := [name for name in Config.model_fields if name not in values and name not in ADDED]:
            # Half a file would be a valid one, and the run would go on with other settings than its own.
            raise UserError(f"{file} is not whole: it has no '{missing[0]}'; bring back what the run was started with")
        config = build_config(values, where=str(file)).model_copy(update={"run_dir": str(folder)})
        run = cls(folder, config)
        if settings:
            newest = run.newest_checkpoint()
            own_drafter = newest is not None and (newest / "drafter").is_dir()
            run.config, run.changes, run._renewed = change_run(config, settings, where, own_drafter)
        return run

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
        made = {key: one for key, one in read_decisions(self.folder).items() if key not in self._renewed}
        return reopen(config or self.config, made, keep)

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
            if COPIES not in self._found:
                shutil.rmtree(self.folder / COPIES, ignore_errors=True)
            if self.checkpoints.name not in self._found and not any(self.checkpoints.iterdir()):
                self.checkpoints.rmdir()
        self.unlock()
        with contextlib.suppress(OSError):  # another run has begun there
            for parent in self._parents:
                parent.rmdir()

    def discard_for(self, where: str, trace: str) -> Path:
        """Remove what was made, but for the traceback of the error that did not let the run start -> its file, beside
        the directory."""
        self.discard()
        return _append_error(self.folder.with_name(f"{self.folder.name}.errors.log"), where, trace)

    def newest_checkpoint(self) -> Path | None:
        """The newest complete one."""
        return checkpoints.newest(self.checkpoints)

    def save(self, write: Callable[[Path], dict[str, Any]], tokenizer: Tokenizer, progress: Progress) -> Path:
        """Write a checkpoint. `write` puts weights and the learner's state into a folder, and returns the tuner's."""
        try:
            best = read_best(self.folder)
            spared = {checkpoint_name(best.step)} if best else set()
            return checkpoints.save(self.checkpoints, write, tokenizer, progress, self.config.checkpoint.keep, spared)
        except (OSError, SafetensorError) as err:
            raise self._disk_error(err, "a checkpoint") from err

    def restore(self) -> Progress:
        """Where the newest checkpoint stands; what was logged after it is forgotten. Everything is read before anything
        is changed."""
        checkpoints.by_step(self.checkpoints)  # which says what is wrong with the folder as a whole
        checkpoints.recover(self.checkpoints)
        newest = self.newest_checkpoint()
        progress = checkpoints.read_progress(newest) if newest is not None else Progress()
        read_lines(self.folder / "metrics.jsonl")
        read_best(self.folder)
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

    def write_samples(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            append_line(self.folder / "samples.jsonl", row)

    def write_answers(self, row: dict[str, Any]) -> None:
        append_line(self.folder / "answers.jsonl", row)

    def write_decisions(self, step: int, decisions: list[tuple[float, Order]]) -> None:
        """Orders to workers in a rollout, when and why."""
        for at, order in decisions:
            what = {"step": step, "at": round(at, 3), "worker": order.worker, "order": type(order).__name__.lower()}
            count = {"requests": len(order.requests)} if isinstance(order, Assign | WriteAhead) else {}
            append_line(self.folder / "decisions.jsonl", what | count | {"reason": order.reason})

    def write_error(self, where: str, trace: str) -> Path:
        """Keep a traceback, which the sentence on the terminal does not show -> the file."""
        return _append_error(self.folder / "errors.log", where, trace)

    def _disk_error(self, err: Exception, what: str) -> RunError:
        return RunError(
            f"{what} could not be written to {self.folder} ({err}); {self.last_saved()}; "
            f"free some space and resume with: {self.resume_command}"
        )

    def last_saved(self) -> str:
        """For a sentence: what there is to resume from."""
        found = checkpoints.by_step(self.checkpoints)
        return f"the last checkpoint, {found[-1]}, is intact" if found else "there is no checkpoint yet"

    @property
    def resume_command(self) -> str:
        return f"paceline train --resume {self.folder}"

    def disk_error(self, err: OSError) -> RunError:
        return self._disk_error(err, "the log")


def _append_error(file: Path, where: str, trace: str) -> Path:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    file.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_to_append(file), "a", encoding="utf-8", errors="backslashreplace") as out:
        out.write(f"{stamp}  {where}\n{trace.rstrip()}\n\n")
    return file


def _fresh(parent: Path, task: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    task = task[:80]  # a name has bounds
    folder = parent / f"{task}-{stamp}"
    n = 1
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            folder.mkdir(parents=True)  # of two that begin in the same second, one gets the name
            return folder
        except FileExistsError:
            n += 1
            folder = parent / f"{task}-{stamp}-{n}"


def _dump(config: Config) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
