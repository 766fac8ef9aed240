"""A run directory as the report reads it: finished, stopped or still going on."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from paceline.config import Config, build_config, flat, read_settings
from paceline.errors import UserError
from paceline.evaluation.records import EvalRecord, read_records
from paceline.files import reading
from paceline.observe.metrics import read_lines, read_rows, speculating
from paceline.observe.timeline import Span, read_timeline
from paceline.run.best import read_best
from paceline.run.changes import Changes, read_changes
from paceline.setup.decisions import Decisions, read_decisions

MAX_DRAWN = 1e100  # a larger number counts as one that is not finite


class AnswersRow(TypedDict):
    """The fields of a row of answers.jsonl that the report reads."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]
    step: int
    lengths: list[Annotated[int, Field(ge=0, le=2**31)]]
    workers: NotRequired[list[Annotated[int, Field(ge=0, le=2**31)]]]


class SampleRow(TypedDict):
    """The fields of a row of samples.jsonl."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]
    step: int
    prompt: Any
    answer: str
    reward: float | None
    finish: NotRequired[str]
    extra: NotRequired[dict[str, Any]]


_ANSWERS = reading.checker(AnswersRow)
_SAMPLES = reading.checker(SampleRow)


@dataclass(frozen=True)
class RunData:
    folder: Path
    settings: dict[str, Any]
    """By dotted key."""
    decided: Decisions
    """Settings that were left open and chosen when the run began."""
    metrics: list[dict[str, Any]]
    """A row per finished step, under the names of this version (`observe.metrics.RENAMED_METRICS`)."""
    spans: list[Span]
    """Of the finished steps."""
    answers: list[dict[str, Any]]
    evaluations: list[EvalRecord] = field(default_factory=list)
    best_step: int | None = None
    """Of the best checkpoint by evaluation."""
    changes: list[tuple[int, Changes]] = field(default_factory=list)
    """Settings that were changed when the run was resumed: (after which step, which)."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Rows of samples.jsonl."""

    @property
    def steps(self) -> int:
        """Steps that the run is meant to have."""
        return int(self.settings.get("steps") or len(self.metrics))

    @property
    def done(self) -> bool:
        return bool(self.metrics) and self.metrics[-1]["step"] >= self.steps

    @property
    def workers(self) -> list[int]:
        """Numbers of the workers that the run has or had."""
        return sorted({*range(self.settings.get("cluster.workers") or 1), *(span.worker for span in self.spans)})

    @property
    def lengths(self) -> list[int]:
        return [n for row in self.answers for n in row["lengths"]]

    @property
    def speculating(self) -> list[dict[str, Any]]:
        return speculating(self.metrics)

    def values(self, name: str) -> list[float]:
        """A metric over the steps; NaN where it is missing."""
        return [float(row.get(name, math.nan)) for row in self.metrics]

    def total(self, name: str) -> float:
        return sum(v for v in self.values(name) if math.isfinite(v))

    def changed_settings(self) -> dict[str, tuple[Any, Any]]:
        """Settings that differ from the schema's defaults, each as (value, default). A setting that the defaults leave
        open and the run chose by itself is not listed."""
        defaults = dict(flat(Config().model_dump(mode="json")))
        changed = {key: (value, defaults.get(key)) for key, value in self.settings.items() if key != "run_dir"}
        return {key: pair for key, pair in changed.items() if self._given(key) != pair[1]}

    def _given(self, key: str) -> Any:
        """The value before it was decided."""
        value = self.settings[key]
        decision = self.decided.get(key)
        return decision.given if decision and decision.decided == value else value


def read_run(folder: Path) -> RunData:
    if not os.path.isfile(folder / "config.yaml"):  # Path.is_file raises on names that no file can have
        raise UserError(f"{reading.shorten(str(folder), 200)} is not a run directory: it has no config.yaml")
    file = reading.inside(folder, "config.yaml")
    settings = build_config(read_settings(file), where=str(file)).model_dump(mode="json")
    metrics = _read_metrics(folder / "metrics.jsonl")
    last = metrics[-1]["step"] if metrics else 0
    spans = [span for span in read_timeline(folder / "timeline.json") if span.step <= last]
    answers = [row for row in _read_checked(folder / "answers.jsonl", _ANSWERS) if row["step"] <= last]
    samples = [row for row in _read_checked(folder / "samples.jsonl", _SAMPLES) if row["step"] <= last]
    evaluations = [record for record in read_records(folder) if record.step <= last]
    best = read_best(folder)
    return RunData(
        folder,
        dict(flat(settings)),
        read_decisions(folder),
        metrics,
        spans,
        answers,
        evaluations,
        best.step if best else None,
        read_changes(folder),
        samples,
    )


def _read_metrics(file: Path) -> list[dict[str, Any]]:
    """One row per step, in order. A number that is too large to be drawn becomes NaN."""
    rows: list[dict[str, Any]] = []
    for row in read_lines(file):
        if rows and row["step"] <= rows[-1]["step"]:
            raise UserError(f"{file} has step {row['step']} behind step {rows[-1]['step']}; fix or remove that line")
        rows.append({name: v if name == "step" or abs(v) < MAX_DRAWN else math.nan for name, v in row.items()})
    return rows


def _read_checked(file: Path, check: Callable[[Any, str], Any]) -> list[dict[str, Any]]:
    return [dict(check(row, f"row {number} of {file}")) for number, (_, row) in enumerate(read_rows(file), 1)]
