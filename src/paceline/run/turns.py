"""What environments and tools returned, by what had led to it (`tasks/environments/records.py`): appended as it comes,
and read again when the run is resumed, because the steps behind the last checkpoint are made again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.observe.metrics import append_line, cut_lines, read_rows

FILE = "turns.jsonl"
COLUMNS = {"key", "observation", "reward", "done", "calls", "errors", "seconds", "attributes", "failed"}


class TurnFile:
    def __init__(self, folder: Path, done: int):
        """Of the run in this folder, whose steps up to `done` are not made again."""
        self._file = folder / FILE
        self._known: dict[str, dict[str, Any]] = {}
        for _, row in read_rows(self._file):
            if not row.keys() >= COLUMNS:
                raise UserError(f"a row of {self._file} is not whole; it has {', '.join(sorted(row))}; remove it")
            if row["step"] > done:
                self._known[row["key"]] = row
        cut_lines(self._file, sys.maxsize)  # half a line at its end

    def find(self, key: str) -> dict[str, Any] | None:
        return self._known.get(key)

    def write(self, row: dict[str, Any]) -> None:
        if row["key"] not in self._known:
            append_line(self._file, row)
