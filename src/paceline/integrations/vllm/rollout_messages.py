"""What a worker and the process of its vLLM engine tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PolicyWeights:
    """Weights by their Hugging Face names, in one of two forms (`weights.py`)."""

    file: str | None = None
    handles: bytes | None = None
    """Pickled: names with what rebuilds each tensor from the memory of the other process."""


@dataclass(frozen=True)
class StartEngine:
    """Comes first."""

    arguments: dict[str, Any]
    """Of vLLM's `EngineArgs`."""
    otherwise: dict[str, Any] | None = None
    """Arguments for a vLLM in which the race was not tested, where speculation needs it to draw rightly."""


@dataclass(frozen=True)
class EngineStarted:
    max_length: int
    """Longest prompt and completion together, in tokens."""
    version: str
    """Of vLLM."""
    seconds: float
    otherwise: bool = False
    """Whether it was started with those other arguments."""


@dataclass(frozen=True)
class EngineFailed:
    """It could not start, or has stopped working; the process ends."""

    sentence: str


@dataclass(frozen=True)
class NewRequest:
    id: str
    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    """Of vLLM's `SamplingParams`."""


@dataclass(frozen=True)
class AddRequests:
    requests: list[NewRequest]


@dataclass(frozen=True)
class AbortRequests:
    ids: list[str]


@dataclass(frozen=True)
class GoToSleep:
    """Give memory away until the next `TakeWeights`; answered by `Asleep`."""


@dataclass(frozen=True)
class Asleep:
    seconds: float


@dataclass(frozen=True)
class TakeWeights:
    """Wake up, and have these weights; answered by `WeightsTaken`. Without weights it only wakes up."""

    policy: PolicyWeights | None
    drafter: str | None = None
    """A folder, if there is another drafter than before."""


@dataclass(frozen=True)
class WeightsTaken:
    error: str | None
    seconds: float
    drafter_error: str | None = None
    """Why the drafter was not taken; the engine goes on with the one before."""


@dataclass(frozen=True)
class EngineRound:
    """A step of vLLM's engine."""

    end: float
    """By the wall clock."""
    seconds: float
    batch: int
    """Sequences that got tokens."""
    tokens: int
    prompts: bool
    """Whether some of them got their first one, or nobody got any."""
    drafted: int = 0
    """Draft tokens that were verified."""
    drafts: int = 0
    """Sequences that had some."""
    accepted: tuple[int, ...] = ()
    """How many of those for the 1st, 2nd, ... position."""


@dataclass(frozen=True)
class FinishedRequest:
    id: str
    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    """By a stop token or stop string; else by its length."""


@dataclass(frozen=True)
class EngineProgress:
    """Sent after a step that finished requests, and else every now and then while there are some."""

    finished: list[FinishedRequest] = field(default_factory=list)
    rounds: list[EngineRound] = field(default_factory=list)
    explored_s: float = 0.0
    tuned_s: float = 0.0
    """Of the tuner, since the engine started."""
