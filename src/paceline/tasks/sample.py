"""What a task is: a stream of samples, each a pure function of its index."""

from __future__ import annotations

import random
from typing import Any, Protocol

from paceline.core import Sample, mix_seed


class Task(Protocol):
    name: str

    @property
    def reward(self) -> str | None:
        """The reward function that belongs to the task, if it has one of its own."""
        ...

    def sample(self, index: int) -> Sample:
        """The sample at an index of the stream of prompts: a pure function of the task's settings and `index`."""
        ...


def text_of(completion: Any) -> str:
    """The text of a completion that is text, or messages of which the last one is the answer."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


class SampleOrder:
    """The order in which a finite number of samples is visited: all of them, then all again in another order."""

    def __init__(self, count: int, seed: int, shuffle: bool = True):
        self.count = count
        self.seed = mix_seed(seed, "order")
        self.shuffle = shuffle
        self._epoch = -1
        self._rows = list(range(count))  # of the present epoch, in the order of their visit

    def at(self, index: int) -> int:
        """The row that is visited at an index of the endless stream of prompts."""
        epoch, position = divmod(index, self.count)
        if self.shuffle and epoch != self._epoch:
            self._epoch = epoch
            self._rows = list(range(self.count))
            random.Random(mix_seed(self.seed, epoch)).shuffle(self._rows)
        return self._rows[position]
