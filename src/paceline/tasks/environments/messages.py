"""What the driver and the processes that run environments say to each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from paceline.core import Prompt, Sample
from paceline.tasks.environments.calls import Family
from paceline.tasks.environments.protocol import StepResult


@dataclass(frozen=True)
class ToolboxSpec:
    """What a process imports, by name."""

    environment: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    tools: tuple[str, ...] = ()
    mcp: tuple[str, ...] = ()
    """Command lines of MCP servers."""
    family: Family = "plain"
    max_chars: int = 10_000
    start_timeout_s: float = 120.0


@dataclass(frozen=True)
class ToolboxReady:
    """All is there, or why it is not."""

    problem: str | None
    schemas: tuple[dict[str, Any], ...] = ()
    keeps_state: bool = False
    """Whether a step depends on those before it."""


@dataclass(frozen=True)
class Action:
    """A turn, as an environment gets it."""

    text: str
    raw: str
    """With special tokens, as some families mark their tool calls."""
    end: str = ""
    """The token that ended it, as text; empty if none did."""
    failed: bool = False
    """It hung or took its process with it: it is not done again to come back to where it was."""


@dataclass
class EnvironmentJob:
    """One step of an episode; without actions, its prompt."""

    number: int
    episode: int
    sample: Sample
    actions: tuple[Action, ...] = ()
    """All of it so far: where the process does not know the episode, it does the others first."""
    last: bool = False
    alone: bool = False
    """Nothing else runs beside it: something ended a process, and it may have been this."""
    killed: bool = False
    """A signal has ended its process once, which may have been meant for something else."""
    sent: float = field(default_factory=time.monotonic)

    @property
    def chars(self) -> int:
        return sum(len(action.text) for action in self.actions)


@dataclass(frozen=True)
class JobDone:
    number: int
    result: StepResult | None = None
    prompt: Prompt | None = None
    error: str = ""
    """What an environment raised, or returned."""
    trace: str = ""
