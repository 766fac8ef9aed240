"""What the driver and its workers say to each other, beside the reports that the coordinator decides by."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.cluster.coordinator import Report

if TYPE_CHECKING:
    from paceline.core import Completion, Turn
    from paceline.rollout.stats import EngineStats, RoundRecord
    from paceline.spot.trainer import TrainingStats

LOADING = "loading"
"""What a worker does before it is ready, as `Failed.doing` has it."""


@dataclass(frozen=True)
class WorkerSpec:
    """Where a worker works and what it begins with."""

    number: int
    generation: int
    """Counts the starts of this worker, from 1."""
    workers: int
    """Of the whole cluster."""
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
    learns: bool = True
    """Whether it takes part in updates, for which it needs the optimizer's state."""
    base: str = ""
    """The model that training began with, which adapters belong to: a folder or a hub id."""


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
    """How many of its requests have not begun."""
    tokens: int
    """Generated since the rollout began."""
    turns: tuple[Turn, ...] = ()
    """That have ended: their requests wait for observations."""


@dataclass(frozen=True)
class Alive(Report):
    """Still at it; or, if it `waits`, there is nothing that it could do before others do something."""

    waits: bool = False


@dataclass(frozen=True)
class Noted(Report):
    """Something that the user should know."""

    sentence: str


@dataclass(frozen=True)
class Returned(Report):
    call: int
    value: Any


@dataclass(frozen=True)
class Failed(Report):
    """Something raised an exception; the worker itself is still there, unless it could not even load."""

    call: int | None
    """None for what it was doing by itself, or was called to do without an answer."""
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

    engine: Literal["adaptive", "plain", "adaptive_control"] = "adaptive"
    """`plain` never speculates. `adaptive_control` is an adaptive engine of its own, to compare with: it uses the same
    drafter, but its tuner and its n-gram index have seen none of the completions of the first one."""
    learn: bool = True
    """Whether drafters may learn from the completions, if they are those of `adaptive`: not from an evaluation's."""


ActivityKind = Literal["idle", "training", "ahead", "tools"]
"""Without work; training the drafter; writing ahead; all that it has waits for tools or environments."""


@dataclass(frozen=True)
class Activity:
    """A stretch of a rollout in which a worker did not decode; seconds by the wall clock."""

    kind: ActivityKind
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class RolloutOutcome:
    """What a worker did in a rollout, as plain records: whoever draws timelines makes spans of them."""

    worker: int
    step: int
    activities: list[Activity]
    rounds: list[RoundRecord]
    clock_offset: float
    """Wall-clock time at the zero of the rounds' clock, in seconds."""
    stats: EngineStats
    training: TrainingStats
    """Of the drafter, since the rollout began."""
    explored_s: float
    """Seconds in strategies other than the best known one, out of `tuned_s`."""
    tuned_s: float
    """Seconds in rounds whose strategy the tuner chose."""
    ahead: dict[int, array[int]] = field(default_factory=dict)
    """What it has written of requests of the next step."""

    def seconds(self, kind: ActivityKind) -> float:
        return sum(activity.seconds for activity in self.activities if activity.kind == kind)
