"""Answers to learn from, with what the policy thought of them, in a bounded number of bytes on the host.

In the tail of a step the answers that are missing are the long ones, and a drafter that has not seen a long answer
cannot help with one. So the longest answers of the step before are kept until this step has its own, and where not all
of this step's fit, the longest are kept.

An answer's length is known before the policy has run over it, and so is whether it is kept: `reserve` makes room, and
`fill` copies what is kept and nothing else. What is held out to judge drafters by has a part of the room for itself, or
a few long answers would leave nothing to judge by.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.errors import UserError

HELD_OUT = 8  # one answer in so many is never trained on, and as much of the room is for those


@dataclass(frozen=True)
class FeatureSample:
    """A prompt and its answer, or a part of them, and what the policy thought of each token."""

    tokens: Tensor  # int32 [n]
    prompt: int
    """How many of them are the prompt, or are there only for what follows."""
    features: Tensor  # [n, taps * hidden]
    hidden: Tensor  # [n, hidden], from which the policy draws the next token
    held_out: bool = False

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.tokens, self.features, self.hidden))

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, first: int, last: int, prompt: int) -> FeatureSample:
        """The tokens [first, last), in the same memory."""
        tokens, features, hidden = (t[first:last] for t in (self.tokens, self.features, self.hidden))
        return replace(self, tokens=tokens, prompt=prompt, features=features, hidden=hidden)

    def on_host(self) -> FeatureSample:
        """In memory of its own: a part of something larger would keep all of it."""
        tokens, features, hidden = (_copy(t) for t in (self.tokens, self.features, self.hidden))
        return replace(self, tokens=tokens, features=features, hidden=hidden)


@dataclass(eq=False)
class BufferEntry:
    """Room for an answer, from before anything of it is computed."""

    tokens: Tensor  # int32 [n], what is kept of the text: all of it, or its first tokens
    prompt: int
    text: int
    """Tokens of the whole text."""
    bytes: int
    held_out: bool
    sample: FeatureSample | None = None
    """What it was made for, once that is there."""
    given_up: bool = False
    """Whether it had to make room for another."""

    def __len__(self) -> int:
        return len(self.tokens)


class Partition:
    """A number of bytes, and the rule who gets them."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.bytes = 0
        self.new: list[BufferEntry] = []
        self.old: list[BufferEntry] = []  # of the step before, shortest first

    def take(self, place: BufferEntry, complete: bool) -> bool:
        """Make room, or leave all as it is. Shorter answers make room for longer ones: first those of the step before,
        then those of this step. What is old and longer keeps half of the shelf, until the answers of this step are
        `complete`: those that come early are short."""
        leave = self._to_leave(place, complete)
        if leave is None:
            return False
        for other in leave:
            (self.old if other in self.old else self.new).remove(other)
            self.drop(other)
        self.new.append(place)
        self.bytes += place.bytes
        return True

    def _to_leave(self, place: BufferEntry, complete: bool) -> list[BufferEntry] | None:
        missing = self.bytes + place.bytes - self.max_bytes
        kept = sum(p.bytes for p in self.old)
        leave: list[BufferEntry] = []
        for other in self.old:
            kept -= other.bytes
            if missing <= 0 or (other.text > place.text and 2 * kept < self.max_bytes and not complete):
                break
            leave.append(other)
            missing -= other.bytes
        for other in sorted(self.new, key=lambda p: p.text):
            if missing <= 0 or other.text >= place.text:
                break
            leave.append(other)
            missing -= other.bytes
        return leave if missing <= 0 else None

    def drop(self, place: BufferEntry) -> None:
        """It has left one of the lists."""
        place.given_up = True
        place.sample = None
        self.bytes -= place.bytes


class SpotBuffer:
    def __init__(self, max_bytes: int):
        if max_bytes <= 0:
            raise UserError(f"the buffer for drafter training needs room, got {max_bytes} bytes")
        self.max_bytes = max_bytes
        self.seen = 0
        """Answers that were ever offered."""
        self.offered = 0
        """Answers of this step that were, or that nobody wanted because there are longer ones."""
        self._held_out = Partition(max_bytes // HELD_OUT)
        self._others = Partition(max_bytes - max_bytes // HELD_OUT)
        self._complete = False

    @property
    def _shelves(self) -> tuple[Partition, Partition]:
        return self._held_out, self._others

    @property
    def bytes(self) -> int:
        """What is kept, and what room was made for."""
        return sum(shelf.bytes for shelf in self._shelves)

    @property
    def samples(self) -> list[FeatureSample]:
        """Those of the step before first."""
        places = [p for s in self._shelves for p in s.old] + [p for s in self._shelves for p in s.new]
        return [p.sample for p in places if p.sample is not None]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def tokens(self) -> int:
        return sum(len(s) for s in self.samples)

    def next_step(self) -> None:
        """What is there becomes old; of all that this step could have left, the longest half is kept."""
        longest = sorted((p for s in self._shelves for p in s.new if p.sample is not None), key=lambda p: p.text)
        kept = set(longest[max(0, len(longest) - (self.offered + 1) // 2) :])
        for shelf in self._shelves:
            for place in [*shelf.old, *(p for p in shelf.new if p not in kept)]:
                shelf.drop(place)
            shelf.old = sorted((p for p in shelf.new if p in kept), key=lambda p: p.text)
            shelf.new = []
        self.offered = 0
        self._complete = False

    def begin_again(self) -> None:
        """Let go of this step's answers, because all of them come again."""
        for shelf in self._shelves:
            for place in shelf.new:
                shelf.drop(place)
            shelf.new = []
        self.offered = 0
        self._complete = True

    def reserve(self, tokens: Sequence[int] | Tensor, prompt: int, width: int) -> BufferEntry | None:
        """Make room for an answer, its prompt's tokens before it, with so many bytes of what the policy thinks of each
        token -> None if it is not kept. What is larger than all the room there is, is kept as far as it fits; what has
        no token to learn from then, not at all."""
        self.seen += 1
        self.offered += 1
        text = torch.as_tensor(tokens, dtype=torch.int32, device="cpu")
        held_out = zlib.crc32(text.numpy().tobytes()) % HELD_OUT == 0
        shelf = self._held_out if held_out else self._others
        each = width + text.element_size()
        fits = min(len(text), shelf.max_bytes // each)
        if fits <= prompt:
            return None
        place = BufferEntry(text[:fits], prompt, len(text), fits * each, held_out)
        if not shelf.take(place, self._complete):
            return None
        place.tokens = _copy(place.tokens)
        return place

    def fill(self, place: BufferEntry, features: Tensor, hidden: Tensor) -> None:
        """What the policy thinks of a text, from its first token on. Only what is kept of it is copied."""
        if place.given_up:
            return
        sample = FeatureSample(place.tokens, place.prompt, features[: len(place)], hidden[: len(place)], place.held_out)
        assert sample.bytes == place.bytes, "room was made for tensors of another width"
        place.sample = replace(sample, features=_copy(sample.features), hidden=_copy(sample.hidden))

    def give_back(self, place: BufferEntry) -> None:
        """Nobody will fill it."""
        if not place.given_up:
            shelf = self._held_out if place.held_out else self._others
            (shelf.new if place in shelf.new else shelf.old).remove(place)
            shelf.drop(place)

    def put(self, sample: FeatureSample) -> bool:
        """Keep an answer of which everything is known -> whether it is kept."""
        width = sum(t[0].numel() * t.element_size() for t in (sample.features, sample.hidden))
        place = self.reserve(sample.tokens, sample.prompt, width)
        if place is None:
            return False
        self.fill(place, sample.features, sample.hidden)
        return True


def _copy(tensor: Tensor) -> Tensor:
    """On the host, in memory of its own."""
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
