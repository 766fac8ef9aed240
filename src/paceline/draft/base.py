"""What a drafter is: something that guesses the next tokens of every running text. Guesses can cost time, nothing else.

A drafter of one's own needs `name` and `propose`; the rest is for those that keep state. See docs/speculation.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paceline.draft.strategy import Strategy

Ints = np.ndarray[Any, np.dtype[np.int32]]


class DraftRequest(Protocol):
    @property
    def id(self) -> int: ...
    @property
    def prompt(self) -> tuple[int, ...]: ...


class DraftSequence(Protocol):
    """A text that is being written: prompt and answer so far."""

    @property
    def request(self) -> DraftRequest: ...
    @property
    def tokens(self) -> list[int]: ...


@dataclass
class Draft:
    """A tree of guesses for each text, at most `strategy.nodes` of them, parents before children."""

    tokens: Ints  # [texts, nodes]; -1 where there is no guess
    parents: Ints  # [texts, nodes]; 0 is the last token of the text, i + 1 is node i

    @classmethod
    def empty(cls, texts: int, nodes: int) -> Draft:
        """No guesses yet; parents as in a chain."""
        parents = np.empty((texts, nodes), np.int32)
        parents[:] = np.arange(nodes)
        return cls(np.full((texts, nodes), -1, np.int32), parents)


class BaseDrafter(ABC):
    name: str

    @abstractmethod
    def propose(self, texts: Many[DraftSequence], strategy: Strategy) -> Draft:
        """Guess how each text goes on."""

    def begin(self, texts: Many[DraftSequence]) -> None:  # noqa: B027 (most drafters keep no state)
        """These have entered the batch, for the first time or after a pause."""

    def follow(self, texts: Many[DraftSequence]) -> None:  # noqa: B027
        """Called while the device is busy with a round: take in what the texts have gained so far."""

    def finish(self, texts: Many[DraftSequence]) -> None:  # noqa: B027
        """These are complete, or have been dropped."""
