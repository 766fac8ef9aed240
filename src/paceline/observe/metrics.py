"""Metrics of a run: one JSON line per step, and the same numbers to TensorBoard, W&B or trackio where asked for."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.files import reading
from paceline.files.writing import append_text, write_aside

RENAMED_METRICS = {
    "timing_s/end": "timing_s/end_rollout",
    "drafter/every": "drafter/train_interval",
    "drafter/thrown_away": "drafter/skipped_steps",
}
"""Names in runs of earlier versions, and what `read_lines` calls them."""


class MetricsLog:
    def __init__(self, folder: Path, tensorboard: bool, wandb: str | None, trackio: str | None, config: dict[str, Any]):
        self.file = folder / "metrics.jsonl"
        trackers = {name: project for name, project in (("wandb", wandb), ("trackio", trackio)) if project}
        self._sinks: list[Any] = [_Tracker(name, project, folder, config) for name, project in trackers.items()]
        if tensorboard:
            self._sinks.append(_TensorBoard(folder / "tensorboard"))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        append_line(self.file, {"step": step} | metrics)
        for sink in self._sinks:
            sink.write(step, metrics)

    def extend(self, step: int, metrics: dict[str, float]) -> None:
        """Add to the line of a step that was logged, or begin one. What it has already is not logged again."""
        if extend_line(self.file, step, metrics):
            for sink in self._sinks:
                sink.write(step, metrics)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def append_line(file: Path, values: dict[str, Any]) -> None:
    append_text(file, json.dumps(without_nan(values), ensure_ascii=False, allow_nan=False) + "\n")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` but for step 0, which is an evaluation and no step: all values numbers, under the
    names of this version; NaN where a number was not finite."""
    rows = []
    for number, (_, row) in enumerate(read_rows(file), 1):
        for name, value in row.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise UserError(
                    f"'{reading.shorten(name)}' of row {number} of {file} is not a number; fix or remove that line"
                )
        if row["step"]:
            rows.append({current_name(name): math.nan if value is None else value for name, value in row.items()})
    return rows


def speculating(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that had speculative rounds: only they have an accept length."""
    return [row for row in rows if row.get("rollout/spec_rounds")]


def current_name(metric: str) -> str:
    return RENAMED_METRICS.get(metric, metric)


def read_rows(file: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a log, raw and parsed: each an object with its step. A kill can leave half a line at the end, which
    is skipped; any other damaged line is an error, because a resumed run would lose it and a reader would get wrong
    numbers without a word."""
    if not os.path.lexists(file):
        return
    lines = reading.read_lines(reading.inside(file.parent, file.name))
    for number, line in lines:
        where = f"line {number} of {file}"
        if not line.strip():
            continue
        try:
            row = reading.parse_json(reading.decode(line, where), where, constants=True)
        except UserError as err:
            if not line.endswith(b"\n"):
                return
            raise UserError(f"{err}; fix or remove that line") from err
        if not isinstance(row, dict) or not _is_step(row.get("step")):
            raise UserError(f"{where} has no step; fix or remove that line")
        yield line, row


def extend_line(file: Path, step: int, values: dict[str, Any]) -> bool:
    """Add values to the line of a step, or append one -> whether it did not have them."""
    rows = list(read_rows(file))
    known = next((row for _, row in rows if row["step"] == step), None)
    if known is None:
        append_line(file, {"step": step} | values)
        return True
    if values.keys() <= known.keys():
        return False
    extended = json.dumps(without_nan(values), ensure_ascii=False, allow_nan=False)[1:-1]
    # The other lines stay as they are, byte by byte.
    lines = (_with(line, extended) if row["step"] == step else line for line, row in rows)
    write_aside(file, (line.rstrip(b"\n") + b"\n" for line in lines))
    return True


def _with(line: bytes, more: str) -> bytes:
    """A line, which is an object with entries, with more entries at its end."""
    return line.rstrip()[:-1] + f", {more}}}".encode()


def cut_lines(file: Path, last_step: int) -> None:
    """Drop the lines after `last_step`: a resumed run writes them again."""
    if os.path.lexists(file):
        write_aside(file, (line.rstrip(b"\n") + b"\n" for line, row in read_rows(file) if row["step"] <= last_step))


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: such numbers become null."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _TensorBoard:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
            raise UserError(f"{folder} is not a folder of the run; remove it, or set log.tensorboard to false")
        self.writer = SummaryWriter(str(folder))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _Tracker:
    """W&B and trackio share one interface."""

    def __init__(self, package: str, project: str, folder: Path, config: dict[str, Any]):
        import importlib

        try:
            self.module = importlib.import_module(package)
        except ImportError as err:
            raise UserError(
                f"log.{package} is set, but {package} is not installed: pip install 'paceline[track]'"
            ) from err
        try:
            self.module.init(project=project, name=folder.name, config=config)
        except Exception as err:  # no account, no network, whatever that package minds
            reason = reading.shorten(str(err).strip().partition("\n")[0], 200)
            raise UserError(f"log.{package} is set, but {package} could not start: {reason}") from err

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.module.log(metrics, step=step)

    def close(self) -> None:
        self.module.finish()


def short_names(names: Sequence[str]) -> list[str]:
    """Names of reward functions without the folders of their files, unless two would be called the same."""
    short = [name.rpartition("/")[2] for name in names]
    return [one if short.count(one) == 1 else name for name, one in zip(names, short, strict=True)]
