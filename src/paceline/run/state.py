"""What has become of a run, read from its directory without touching it: `paceline runs`.

A run that stops for a reason leaves it in RUN/end.json, which is gone when the run goes on. One that was killed leaves
nothing, and is called stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict
from typing_extensions import TypedDict

from paceline.errors import UserError
from paceline.files import reading
from paceline.files.lock import LOCK, OWNER_BYTES
from paceline.files.writing import write_aside
from paceline.observe.metrics import read_lines

END = "end.json"
RunState = Literal["finished", "running", "stopped", "failed", "damaged"]


class End(TypedDict):
    """Why a run stopped."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    state: Literal["stopped", "failed"]
    why: str


@dataclass(frozen=True)
class RunSummary:
    folder: str
    state: RunState
    step: int
    """The last that is done."""
    steps: int
    reward: float | None
    """Mean of the last step."""
    why: str = ""
    """Of one that failed or is damaged."""


def write_end(folder: Path, state: Literal["stopped", "failed"], why: str) -> None:
    """A disk that takes nothing more is told by whoever needs it more."""
    with contextlib.suppress(OSError):
        write_aside(folder / END, json.dumps({"state": state, "why": why}) + "\n")


def forget_end(folder: Path) -> None:
    (folder / END).unlink(missing_ok=True)


def find_runs(folder: Path) -> list[RunSummary]:
    """The run at a folder, or those in it, by name."""
    if not folder.is_dir():
        raise UserError(f"no folder at {reading.shorten(str(folder), 200)}; name one that holds runs")
    if os.path.isfile(folder / "config.yaml"):
        return [summarize_run(folder)]
    return [summarize_run(path) for path in sorted(folder.iterdir()) if os.path.isfile(path / "config.yaml")]


def summarize_run(folder: Path) -> RunSummary:
    try:
        settings = reading.read_yaml(reading.inside(folder, "config.yaml"))
        steps = settings.get("steps") if isinstance(settings, dict) else None
        metrics = read_lines(folder / "metrics.jsonl")
        end = _read_end(folder)
    except UserError as err:
        return RunSummary(str(folder), "damaged", 0, 0, None, str(err))
    steps = steps if isinstance(steps, int) else 0
    step = int(metrics[-1]["step"]) if metrics else 0
    reward = metrics[-1].get("critic/rewards/mean", math.nan) if metrics else math.nan
    state: RunState = "stopped"
    if is_running(folder):
        state = "running"
    elif step >= steps > 0:
        state = "finished"
    elif end is not None:
        state = end["state"]
    why = end["why"] if end is not None and state == "failed" else ""
    return RunSummary(str(folder), state, step, steps, reward if math.isfinite(reward) else None, why)


def _read_end(folder: Path) -> End | None:
    if not os.path.lexists(folder / END):
        return None
    file = reading.inside(folder, END)
    return reading.check(End, reading.read_object(file), str(file))


def is_running(folder: Path) -> bool:
    """Whether a process has the run's lock. The kernel's own list says so without touching it; a lock that another
    machine took last is not listed here, and is tried."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        mark = f":{os.fstat(descriptor).st_ino}"
        rows = Path("/proc/locks").read_text().splitlines() if Path("/proc/locks").exists() else []
        if any("FLOCK" in row and any(word.endswith(mark) for word in row.split()) for row in rows):
            return True
        owner = os.pread(descriptor, OWNER_BYTES, 0).decode("utf-8", "replace").split()
        if owner[-1:] != [socket.gethostname()]:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a disk that has no locks
        return False
    finally:
        os.close(descriptor)
    return False
