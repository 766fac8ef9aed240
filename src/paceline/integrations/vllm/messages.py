"""What a serving engine's process and the side-car that trains its drafter tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GOES_ON = "generation goes on with the drafter that the engine has"
"""The end of every sentence about what went wrong."""

Activity = Literal["idle", "tail", "busy"]
"""Of the engine: nothing to do, few of its requests left, or many."""


When = Literal["idle", "tail", "always"]
"""Trains while the engine has nothing to do, also while few of its requests are left, or whatever it does."""


@dataclass(frozen=True)
class NewVersion:
    """A drafter that the engine should have."""

    version: int
    folder: str
    of_offer: bool = False
    """Whether it was offered, and not trained here."""


@dataclass(frozen=True)
class Answers:
    """Tokens of prompts and of their finished answers."""

    of: list[tuple[list[int], list[int]]]


@dataclass(frozen=True)
class NowDoing:
    activity: Activity


@dataclass(frozen=True)
class PolicyAt:
    """The policy's weights are others now: a checkpoint of them."""

    folder: str
    temporary: bool
    """Written for this message only: whoever has read it removes it."""


@dataclass(frozen=True)
class Offered:
    """A drafter from elsewhere."""

    folder: str


@dataclass(frozen=True)
class Beat:
    """Sent now and then, between two things to do: it is alive."""


@dataclass(frozen=True)
class Following:
    """The policy is loaded, and training begins as soon as there are answers."""

    memory: str
    """What it takes, in words."""


@dataclass(frozen=True)
class Trouble:
    """Something went wrong, or was refused; training goes on."""

    sentence: str
    of_offer: bool = False


@dataclass(frozen=True)
class GaveUp:
    """Training has ended, for this reason."""

    sentence: str
