"""Answers to learn from, with the policy's features and hidden states, in a bounded number of bytes on the host.

In the tail of a step the answers that are missing are the long ones, and a drafter that has not seen a long answer
cannot help with one. So the longest answers of the step before are kept until this step has its own, and where not all
of this step's fit, the longest are kept. A share of the bytes can be for the others, of any length, chosen by their
hash; it is 0 until `benchmarks/spot_buffer.py` shows over enough seeds that it helps.

An answer's length and hash are known before the policy has run over it, and so is whether it is kept: `reserve` sets
bytes aside, and `fill` copies what is kept and nothing else. Held-out answers, by which drafters are evaluated, have an
eighth of the bytes for themselves, or a few long answers would leave nothing to evaluate by.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core import Spans, moved
from paceline.errors import UserError
from paceline.spot.partition import BufferEntry, Partition, by_hash
from paceline.spot.samples import FeatureSample, copy_to_host

HELD_OUT = 8  # one answer in so many is never trained on, and one byte in so many is for those
ANY_LENGTH = 0.25  # of the other bytes: the share for answers of any length that the benchmark compares with none


class SpotBuffer:
    def __init__(self, max_bytes: int, any_length: float = 0.0):
        """`any_length` is the share of the bytes for training that is not given to the longest answers."""
        if max_bytes <= 0:
            raise UserError(f"the buffer for drafter training has no capacity: it got {max_bytes} bytes")
        self.max_bytes = max_bytes
        self.seen = 0
        """Answers that were ever offered."""
        self.offered = 0
        """Answers of this step that were, or that nobody wanted because there are longer ones."""
        training = max_bytes - max_bytes // HELD_OUT
        any_bytes = int(training * any_length)
        self._held_out = Partition(max_bytes // HELD_OUT)
        self._longest = Partition(training - any_bytes)
        self._any_length = Partition(any_bytes, by_hash)
        self._complete = False

    @property
    def _partitions(self) -> tuple[Partition, ...]:
        return self._held_out, self._longest, self._any_length

    @property
    def bytes(self) -> int:
        """What is kept, and what is reserved."""
        return sum(partition.bytes for partition in self._partitions)

    @property
    def samples(self) -> list[FeatureSample]:
        """Those of the step before first."""
        entries = [e for p in self._partitions for e in p.old] + [e for p in self._partitions for e in p.new]
        return [e.sample for e in entries if e.sample is not None]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def tokens(self) -> int:
        return sum(len(s) for s in self.samples)

    def next_step(self) -> None:
        """What is there becomes old; of all that this step could have left, the longest half is kept."""
        filled = [e for p in self._partitions for e in p.new if e.sample is not None]
        filled.sort(key=lambda e: e.length)
        kept = set(filled[max(0, len(filled) - (self.offered + 1) // 2) :])
        for partition in self._partitions:
            partition.next_step(kept)
        self.offered = 0
        self._complete = False

    def begin_again(self) -> None:
        """Let go of this step's answers, because all of them come again."""
        for partition in self._partitions:
            partition.clear(list(partition.new))
        self.offered = 0
        self._complete = True

    def reserve(
        self, tokens: Sequence[int] | Tensor, prompt: int, width: int, observed: Spans = ()
    ) -> BufferEntry | None:
        """Set bytes aside for an answer, its prompt before it, with `width` bytes of features and hidden states per
        token, of which nothing is learned about those that were `observed` -> None if it is not kept. What is larger
        than the capacity is kept as far as it fits; what has no token to learn from then, not at all."""
        self.seen += 1
        self.offered += 1
        stored = torch.as_tensor(tokens, dtype=torch.int32, device="cpu")
        rank, bucket = divmod(zlib.crc32(stored.numpy().tobytes()), HELD_OUT)
        held_out = bucket == 0
        partition = self._held_out if held_out else self._longest
        each = width + stored.element_size()
        fits = min(len(stored), partition.max_bytes // each)
        if fits <= prompt:
            return None
        spans = moved(observed, 0, fits)
        entry = BufferEntry(stored[:fits], prompt, len(stored), fits * each, rank, held_out, spans)
        if not self._take(entry):
            return None
        entry.tokens = copy_to_host(entry.tokens)
        return entry

    def _take(self, entry: BufferEntry) -> bool:
        """Whether it is kept: among the longest, or else, as those that leave for it, among those of any length."""
        if entry.held_out:
            gone = self._held_out.take(entry, self._complete)
            for other in gone or []:
                other.evict()
            return gone is not None
        gone = self._longest.take(entry, self._complete)
        for other in [entry] if gone is None else gone:
            gone_too = self._any_length.take(other, self._complete)
            for last in [other] if gone_too is None else gone_too:
                last.evict()
        return not entry.evicted

    def fill(self, entry: BufferEntry, features: Tensor, hidden: Tensor) -> None:
        """The policy has run over an answer, from its first token on. Only what is kept of it is copied."""
        if entry.evicted:
            return
        count = len(entry)
        size = sum(t[:count].numel() * t.element_size() for t in (entry.tokens, features, hidden))
        assert size == entry.bytes, "reserved for tensors of another width"
        features, hidden = (copy_to_host(t[:count]) for t in (features, hidden))
        entry.sample = FeatureSample(entry.tokens, entry.prompt, features, hidden, entry.held_out, entry.observed)

    def give_back(self, entry: BufferEntry) -> None:
        """Nobody will fill it."""
        for partition in self._partitions:
            if entry in partition:
                partition.clear([entry])

    def put(self, sample: FeatureSample) -> bool:
        """Keep an answer of which everything is known -> whether it is kept."""
        width = sum(t[0].numel() * t.element_size() for t in (sample.features, sample.hidden))
        entry = self.reserve(sample.tokens, sample.prompt, width, sample.observed)
        if entry is None:
            return False
        self.fill(entry, sample.features, sample.hidden)
        return True
