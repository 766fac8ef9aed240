"""What a drafter learns from: the tokens of an answer with the policy's features and hidden states, whole, in pieces of
the size of a training step, and laid out end to end."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core import Spans, moved
from paceline.draft.eagle.loss import PackedSequences, before_completions


@dataclass(frozen=True)
class FeatureSample:
    """A prompt and its answer, or a part of them, with what the policy computed for each token."""

    tokens: Tensor  # int32 [n]
    prompt: int
    """How many of the tokens are the prompt, or are there only for what follows."""
    features: Tensor  # [n, taps * hidden]
    hidden: Tensor  # [n, hidden], from which the policy draws the next token
    held_out: bool = False
    observed: Spans = ()
    """Which of the tokens the policy did not draw."""

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.tokens, self.features, self.hidden))

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, first: int, last: int, prompt: int) -> FeatureSample:
        """The tokens [first, last), in the same memory."""
        tokens, features, hidden = (t[first:last] for t in (self.tokens, self.features, self.hidden))
        observed = moved(self.observed, -first, last - first)
        return replace(self, tokens=tokens, prompt=prompt, features=features, hidden=hidden, observed=observed)

    def on_host(self) -> FeatureSample:
        """In memory of its own: a part of something larger would keep all of it."""
        tokens, features, hidden = (copy_to_host(t) for t in (self.tokens, self.features, self.hidden))
        return replace(self, tokens=tokens, features=features, hidden=hidden)


def copy_to_host(tensor: Tensor) -> Tensor:
    """On the host, in memory of its own."""
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def cut(sample: FeatureSample, size: int, rng: random.Random) -> list[FeatureSample]:
    """A long answer in pieces of `size` tokens, the size of a step, cut at other positions each time, so that a step
    takes the time that it may and all of the answer is learned from. A drafter does not know its absolute position."""
    if len(sample) <= size:
        return [sample]
    first = max(0, sample.prompt - size // 2)  # of a long prompt, its end
    edges = [first, *range(first + rng.randint(size // 2 + 2, size), len(sample), size), len(sample)]
    pieces = (_piece(sample, *ends) for ends in itertools.pairwise(edges))
    return [piece for piece in pieces if len(piece) > piece.prompt]


def excerpt(sample: FeatureSample, size: int) -> FeatureSample:
    """`size` tokens of a longer answer, from a position on that is always the same for it."""
    if len(sample) <= size:
        return sample
    first = max(0, sample.prompt - size // 2)
    last = max(first, len(sample) - size)
    first += int(sample.tokens.sum()) % (last - first + 1)
    return _piece(sample, first, min(len(sample), first + size))


def _piece(sample: FeatureSample, first: int, last: int) -> FeatureSample:
    """The features before its first token are not there, so nothing is learned at that token."""
    return sample.part(first, last, sample.prompt if first == 0 else max(2, sample.prompt - first))


def lay_out(samples: list[FeatureSample], pin: bool = False) -> PackedSequences:
    """Samples end to end, on the host; pinned there, so that a GPU fetches them by itself."""
    count = sum(map(len, samples))

    def joined(parts: list[Tensor]) -> Tensor:
        out = torch.empty(count, *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=pin)
        return torch.cat(parts, out=out)

    return PackedSequences(
        tokens=joined([s.tokens.long() for s in samples]),
        positions=joined([torch.arange(len(s)) for s in samples]),
        features=joined([s.features for s in samples]),
        hidden=joined([s.hidden for s in samples]),
        learn=before_completions([len(s) for s in samples], [s.prompt for s in samples], [s.observed for s in samples]),
    )
