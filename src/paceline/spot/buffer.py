"""Answers to learn from, with what the policy thought of them, in a bounded number of bytes on the host.

In the tail of a step the answers that are missing are the long ones, and a drafter that has not seen a long answer
cannot help with one. So the longest answers of the step before are kept until this step has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.errors import UserError


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer, and what the policy thought of each token."""

    tokens: Tensor  # int32 [n]
    prompt: int
    """How many of them are the prompt."""
    features: Tensor  # [n, taps * hidden]
    hidden: Tensor  # [n, hidden], from which the policy draws the next token

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.tokens, self.features, self.hidden))

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Sample:
        """Its first tokens, in memory of their own."""
        tokens, features, hidden = (t[:count].clone() for t in (self.tokens, self.features, self.hidden))
        return Sample(tokens, self.prompt, features, hidden)

    def on_host(self) -> Sample:
        """In memory of its own: a part of something larger would keep all of it."""
        tokens, features, hidden = (t.to("cpu", copy=True) for t in (self.tokens, self.features, self.hidden))
        return Sample(tokens, self.prompt, features, hidden)


class SpotBuffer:
    def __init__(self, max_bytes: int):
        if max_bytes <= 0:
            raise UserError(f"the buffer for drafter training needs room, got {max_bytes} bytes")
        self.max_bytes = max_bytes
        self.bytes = 0
        self.seen = 0
        """Answers that were ever put in."""
        self._new: list[Sample] = []
        self._old: list[Sample] = []  # of the step before, shortest first

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    @property
    def samples(self) -> list[Sample]:
        return [*self._old, *self._new]

    @property
    def tokens(self) -> int:
        return sum(len(s) for s in self.samples)

    def next_step(self) -> None:
        """What is there becomes old; of that, the longest half is kept."""
        self._old, self._new = sorted(self._new, key=len)[len(self._new) // 2 :], []
        self.bytes = sum(s.bytes for s in self._old)

    def forget_new(self) -> None:
        """Let go of this step's answers, because they come again."""
        self._new = []
        self.bytes = sum(s.bytes for s in self._old)

    def put(self, sample: Sample) -> None:
        """Keep an answer. What is old makes room for it, the shortest first, and then what came first in this step. An
        answer that is larger than all the room there is, is kept as far as it fits; one with no token to learn from,
        not at all."""
        self.seen += 1
        sample = sample.on_host()
        if sample.bytes > self.max_bytes:
            sample = sample.first(self.max_bytes * len(sample) // sample.bytes)
        if len(sample) <= sample.prompt:
            return
        while self.bytes + sample.bytes > self.max_bytes:
            self.bytes -= (self._old or self._new).pop(0).bytes
        self._new.append(sample)
        self.bytes += sample.bytes
