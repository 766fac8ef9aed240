"""What goes wrong in reward functions: told once per step on the screen, with file and line, and in full in
rewards.log."""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from pathlib import Path
from types import TracebackType

from paceline.files.writing import open_to_append

FULL_TRACES = 3
"""Of errors at the same line: how many are logged with their traceback, the others as a line."""
MAX_TRACE = 20_000  # characters
MAX_TOLD = 3  # different errors of a step that are told on the screen


class BadReward(Exception):
    """A reward function gave something that cannot be used."""


def where_raised(trace: TracebackType | None) -> str:
    """The file and line of the user's code in which an error was raised: the innermost one outside of libraries."""
    frames = [frame for frame in traceback.extract_tb(trace) if not _is_ours(frame.filename)]
    own = [frame for frame in frames if "site-packages" not in frame.filename and os.path.isfile(frame.filename)]
    libraries = os.path.dirname(os.__file__)
    own = [frame for frame in own if not frame.filename.startswith(libraries)] or own or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _is_ours(file: str) -> bool:
    return file.startswith(str(Path(__file__).parents[1]) + os.sep)


class RewardErrors:
    """Of a run: written to its log as they come, and summed up for each step."""

    def __init__(self, log: Path | None):
        self.log = log
        self._logged: Counter[str] = Counter()
        self._step: dict[str, list[str]] = {}
        """Answers of the present step by the kind of error."""

    def add(self, kind: str, sentence: str, trace: str, which: str) -> None:
        """`kind` is equal for errors of the same cause; `which` says which answer it was."""
        self._step.setdefault(kind, []).append(f"{sentence} on {which}")
        self._logged[kind] += 1
        if self.log is None:
            return
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {sentence} on {which}\n"
        if trace and self._logged[kind] <= FULL_TRACES:
            text += trace[-MAX_TRACE:].rstrip() + "\n\n"
        with os.fdopen(open_to_append(self.log), "a", encoding="utf-8", errors="backslashreplace") as out:
            out.write(text)

    def told(self, value: float) -> list[str]:
        """Sentences about the step's errors, which were counted as `value`; forgets them."""
        kinds = sorted(self._step.values(), key=len, reverse=True)
        self._step = {}
        said = [
            f"{first}; counted as {value:g}" + (f", like {len(others)} more of this step" if others else "")
            for first, *others in kinds[:MAX_TOLD]
        ]
        if said and self.log is not None:
            said[0] += f" (traceback in {self.log})"
        if len(kinds) > MAX_TOLD:
            said.append(f"{len(kinds) - MAX_TOLD} more kinds of errors in rewards; all are in {self.log}")
        return said
