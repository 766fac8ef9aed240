"""A run directory, read for looking at: finished, stopped or still going on."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.config import Config
from paceline.decisions import Decisions, flat, read_decisions
from paceline.errors import UserError
from paceline.observe.metrics import read_lines
from paceline.observe.timeline import Span, read_timeline


@dataclass(frozen=True)
class RunData:
    folder: Path
    settings: dict[str, Any]
    """By dotted key."""
    decided: Decisions
    """Those of them that were left open."""
    metrics: list[dict[str, Any]]
    """A row per finished step."""
    spans: list[Span]
    """Of the finished steps."""
    answers: list[dict[str, Any]]

    @property
    def steps(self) -> int:
        """Steps that the run is meant to have."""
        return int(self.settings.get("steps") or len(self.metrics))

    @property
    def done(self) -> bool:
        return bool(self.metrics) and self.metrics[-1]["step"] >= self.steps

    @property
    def workers(self) -> list[int]:
        """Those that the run has, and those that it had."""
        return sorted({*range(self.settings.get("cluster.workers") or 1), *(span.worker for span in self.spans)})

    @property
    def lengths(self) -> list[int]:
        return [n for row in self.answers for n in row["lengths"]]

    def values(self, name: str) -> list[float]:
        """A metric over the steps; NaN where it is missing."""
        return [float(row.get(name, math.nan)) for row in self.metrics]

    def total(self, name: str) -> float:
        return sum(v for v in self.values(name) if math.isfinite(v))

    def changed_settings(self) -> dict[str, tuple[Any, Any]]:
        """Settings that are not the schema's defaults, each with its default. What the defaults leave open is no change
        if it was decided."""
        usual = dict(flat(Config().model_dump(mode="json")))
        changed = {key: (value, usual.get(key)) for key, value in self.settings.items() if key != "run_dir"}
        return {key: pair for key, pair in changed.items() if self._given(key) != pair[1]}

    def _given(self, key: str) -> Any:
        value, decision = self.settings[key], self.decided.get(key)
        return decision.given if decision and decision.decided == value else value


def read_run(folder: Path) -> RunData:
    file = folder / "config.yaml"
    if not file.is_file():
        raise UserError(f"{folder} is not a run directory: it has no config.yaml")
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise UserError(f"{file} is not valid YAML, so the run cannot be read") from err
    if not isinstance(settings, dict):
        raise UserError(f"{file} holds no settings, so the run cannot be read")
    metrics = _read_metrics(folder / "metrics.jsonl")
    last = metrics[-1]["step"] if metrics else 0
    spans = [span for span in read_timeline(folder / "timeline.json") if span.step <= last]
    answers = [row for row in read_lines(folder / "answers.jsonl") if row["step"] <= last]
    return RunData(folder, dict(flat(settings)), read_decisions(folder), metrics, spans, answers)


def _read_metrics(file: Path) -> list[dict[str, Any]]:
    """Unlike where a run goes on, a damaged line is an error here: numbers would be wrong without a word. Only the last
    line may be a half one, because the run may be writing it at this moment."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for at, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as err:
            if at == len(lines):
                break
            raise UserError(f"line {at} of {file} is not JSON; mend or remove it") from err
        if row is None:
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f"line {at} of {file} has no step; mend or remove it")
        if not all(isinstance(value, int | float) for value in row.values()):
            raise UserError(f"line {at} of {file} holds something that is not a number; mend or remove it")
        rows.append(row)
    return rows
