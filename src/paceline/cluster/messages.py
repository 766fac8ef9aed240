"""What the driver and its workers say to each other, beside the reports that the coordinator decides by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.cluster.coordinator import Report
from paceline.core import Completion


@dataclass(frozen=True)
class WorkerSpec:
    """Where a worker works and what it begins with."""

    number: int
    life: int
    workers: int
    source: str
    """The policy: a folder or a hub id."""
    state: Path | None
    """A checkpoint of the run, if there is one."""
    device: str
    run: Path | None = None
    """The run directory, where the newest drafter is kept."""
    sharing: int = 1
    """Workers on the same device."""
    threads: int | None = None
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """Do something. With a number, the worker says when it is done."""

    name: str
    args: tuple[Any, ...] = ()
    number: int | None = None


@dataclass(frozen=True)
class Ready(Report):
    """It has loaded everything."""

    max_length: int
    """Longest prompt and answer together."""
    has_drafter: bool


@dataclass(frozen=True)
class RolloutProgress(Report):
    """How decoding goes."""

    completions: tuple[Completion, ...]
    waiting: int
    """Requests that it holds and has not begun."""
    tokens: int
    """Written since the rollout began."""


@dataclass(frozen=True)
class Alive(Report):
    """Still at it; or, if it `waits`, there is nothing that it could do before others do something."""

    waits: bool = False


@dataclass(frozen=True)
class Returned(Report):
    call: int
    value: Any


@dataclass(frozen=True)
class Failed(Report):
    """Something raised an exception; the worker itself is still there, unless it could not even load."""

    call: int | None
    """None for what it was doing by itself, or was told to do without an answer."""
    doing: str
    """`loading`, the name of a call, or what it does between calls."""
    kind: Literal["peer", "disk", "user", "error"]
    """Another worker was lost; a file could not be written; the user has to fix something; or something that nobody
    foresaw."""
    error: str
    """One sentence."""
    trace: str = ""
    """The traceback."""
    unreachable: tuple[int, ...] = ()
    """Workers that this one could not reach, as far as it knows."""


@dataclass(frozen=True)
class RolloutMode:
    """How a rollout is made."""

    engine: Literal["adaptive", "plain", "twin"] = "adaptive"
    """`plain` is one that never guesses. A `twin` is as the adaptive one but has seen none of its answers, and uses the
    same drafter."""
    keep_rounds: bool = False
    """For a picture of every round."""
