"""Metrics of a run: one JSON line per step, and the same numbers to TensorBoard, W&B or trackio where asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import UserError


class MetricsLog:
    def __init__(self, folder: Path, tensorboard: bool, wandb: str | None, trackio: str | None, config: dict[str, Any]):
        self.file = folder / "metrics.jsonl"
        self._sinks: list[Any] = []
        if tensorboard:
            self._sinks.append(_TensorBoard(folder / "tensorboard"))
        for name, project in (("wandb", wandb), ("trackio", trackio)):
            if project:
                self._sinks.append(_Tracker(name, project, folder, config))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        append_line(self.file, {"step": step} | metrics)
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def append_line(file: Path, values: dict[str, Any]) -> None:
    with open(file, "a", encoding="utf-8") as out:
        out.write(json.dumps(values, ensure_ascii=False) + "\n")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """All whole lines. A kill can leave half a line at the end; it is passed over."""
    if not file.is_file():
        return []
    out = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            out.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return out


def cut_lines(file: Path, last_step: int) -> None:
    """Forget what was written after `last_step`, so that a resumed run writes it again."""
    if not file.is_file():
        return
    kept = [row for row in read_lines(file) if row["step"] <= last_step]
    aside = file.with_suffix(".tmp")
    aside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
    aside.replace(file)


class _TensorBoard:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

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
        self.module.init(project=project, name=folder.name, config=config)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.module.log(metrics, step=step)

    def close(self) -> None:
        self.module.finish()
