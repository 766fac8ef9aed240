"""A number of bytes of the spot buffer, and the rule which answers get them: those of the highest rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from paceline.core import Spans
    from paceline.spot.samples import FeatureSample


@dataclass(eq=False)
class BufferEntry:
    """Bytes reserved for an answer, from before anything of it is computed."""

    tokens: Tensor  # int32 [n], what is kept of the prompt and the answer: all of it, or its first tokens
    prompt: int
    """How many of the tokens are the prompt."""
    length: int
    """Tokens of the prompt and the whole answer."""
    bytes: int
    hash: int
    """Of the tokens: says nothing about the length."""
    held_out: bool
    observed: Spans = ()
    """Which of the tokens the policy did not draw."""
    sample: FeatureSample | None = None
    """What the bytes were reserved for, once it is computed."""
    evicted: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def evict(self) -> None:
        """It has left its partition."""
        self.evicted = True
        self.sample = None


Rank = Callable[[BufferEntry], int]


def by_length(entry: BufferEntry) -> int:
    return entry.length


def by_hash(entry: BufferEntry) -> int:
    return entry.hash


class Partition:
    def __init__(self, max_bytes: int, rank: Rank = by_length):
        self.max_bytes = max_bytes
        self.rank = rank
        self.bytes = 0
        self.new: list[BufferEntry] = []
        self.old: list[BufferEntry] = []  # of the step before, lowest rank first

    def __contains__(self, entry: BufferEntry) -> bool:
        return entry in self.new or entry in self.old

    def take(self, entry: BufferEntry, complete: bool) -> list[BufferEntry] | None:
        """Take an answer in -> those of this step that had to leave for it; None if it is not taken, and all is as it
        was. Answers of lower rank leave: first those of the step before, then those of this step. Half of the bytes
        stay with older answers of higher rank, until the answers of this step are `complete`: those that come early
        are short."""
        leaving = self._to_leave(entry, complete)
        if leaving is None:
            return None
        gone = []
        for other in leaving:
            if other in self.old:
                other.evict()
            else:
                gone.append(other)
            self.remove(other)
        self.new.append(entry)
        self.bytes += entry.bytes
        return gone

    def _to_leave(self, entry: BufferEntry, complete: bool) -> list[BufferEntry] | None:
        rank = self.rank(entry)
        missing = self.bytes + entry.bytes - self.max_bytes
        left = sum(other.bytes for other in self.old)
        leaving: list[BufferEntry] = []
        for other in self.old:
            left -= other.bytes
            if missing <= 0 or (self.rank(other) > rank and 2 * left < self.max_bytes and not complete):
                break
            leaving.append(other)
            missing -= other.bytes
        for other in sorted(self.new, key=self.rank):
            if missing <= 0 or self.rank(other) >= rank:
                break
            leaving.append(other)
            missing -= other.bytes
        return leaving if missing <= 0 else None

    def remove(self, entry: BufferEntry) -> None:
        (self.old if entry in self.old else self.new).remove(entry)
        self.bytes -= entry.bytes

    def clear(self, entries: list[BufferEntry]) -> None:
        """Evict these."""
        for entry in entries:
            self.remove(entry)
            entry.evict()

    def next_step(self, kept: set[BufferEntry]) -> None:
        """What is new and `kept` becomes old; the rest is evicted."""
        self.clear([*self.old, *(entry for entry in self.new if entry not in kept)])
        self.old = sorted(self.new, key=self.rank)
        self.new = []
