"""The vocabulary of tasks: a sample is a prompt and whatever its reward needs to know."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any, Protocol

Prompt = str | list[dict[str, Any]]
"""Text, or messages for the model's chat template."""


@dataclass(frozen=True)
class Sample:
    index: int
    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict)
    """Passed to the reward functions by name."""
    origin: str = ""
    """Which row it is, for messages: "line 7 of data.jsonl"; empty for one that was generated."""

    @property
    def where(self) -> str:
        """For messages."""
        return f"sample {self.index} ({self.origin})" if self.origin else f"sample {self.index}"


class Task(Protocol):
    name: str

    @property
    def reward(self) -> str | None:
        """The reward function that belongs to the task, if it has one of its own."""
        ...

    def sample(self, index: int) -> Sample:
        """The sample at a place in the stream of prompts: a pure function of the task's settings and `index`."""
        ...


def text_of(completion: Any) -> str:
    """The text of a completion that is text, or messages whose last one is the answer."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def mix_seed(*parts: int | str) -> int:
    """One seed from several, the same on every machine and in every process."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Order:
    """The order in which a finite number of samples is visited: all of them, then all again in another order."""

    def __init__(self, count: int, seed: int, shuffle: bool = True):
        self.count, self.seed, self.shuffle = count, mix_seed(seed, "order"), shuffle
        self._epoch, self._places = -1, list(range(count))

    def at(self, index: int) -> int:
        epoch, place = divmod(index, self.count)
        if self.shuffle and epoch != self._epoch:
            self._epoch, self._places = epoch, list(range(self.count))
            random.Random(mix_seed(self.seed, epoch)).shuffle(self._places)
        return self._places[place]
