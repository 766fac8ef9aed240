"""Guesses from what was written before: when the last few tokens have occurred earlier, what came next may come again.

Matches are looked for in the text itself, in the answers that are being written to the same prompt, and in earlier
answers to it; a prompt never sees another prompt's answers. All texts lie in one array, and a hash table with a fixed
number of places per key points at the latest occurrences of each run of 12, 6 and 3 tokens. Both have a fixed size, so
memory is bounded; old answers are overwritten. Everything is worked out for the whole batch at once in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from paceline.draft.drafter import Draft, Drafter, Text
from paceline.draft.strategy import Strategy

GRAMS = (12, 6, 3)
WAYS = 4  # latest occurrences that are remembered of each run
_MIX = np.uint64(0x9E3779B97F4A7C15)

Array = np.ndarray[Any, Any]


class SuffixDrafter(Drafter):
    name = "suffix"

    def __init__(self, max_batch: int, max_length: int, memory_bytes: int = 64 * 2**20):
        self.width = max_length
        # Half for texts, half for the table; in any case room for those that run.
        self.lines = max(2 * max_batch, memory_bytes // 2 // (4 * max_length))
        buckets = max(1024, memory_bytes // 2 // (4 * WAYS))
        self._bits = buckets.bit_length() - 1
        self._texts = np.full(self.lines * max_length, -1, np.int32)
        self._table = np.full((1 << self._bits, WAYS), -1, np.int32)
        self._lengths = np.zeros(self.lines, np.int64)
        self._prompts = np.zeros(self.lines, np.uint64)
        self._line_of: dict[int, int] = {}  # request -> line of a text that runs
        self._taken = np.zeros(self.lines, bool)
        self._next = 0
        self._powers = np.power(np.uint64(0x100000001B3), np.arange(max(GRAMS), dtype=np.uint64))

    @property
    def memory_bytes(self) -> int:
        return self._texts.nbytes + self._table.nbytes + self._lengths.nbytes + self._prompts.nbytes

    def begin(self, texts: Many[Text]) -> None:
        for text in texts:
            if text.request.id in self._line_of:
                continue  # back after a pause
            while self._taken[self._next]:
                self._next = (self._next + 1) % self.lines
            line, self._next = self._next, (self._next + 1) % self.lines
            self._taken[line], self._lengths[line] = True, 0
            self._prompts[line] = np.uint64(hash(text.request.prompt) & (2**64 - 1))
            self._line_of[text.request.id] = line

    def finish(self, texts: Many[Text]) -> None:
        self._taken[self._follow(texts)] = False
        for text in texts:
            del self._line_of[text.request.id]

    def propose(self, texts: Many[Text], strategy: Strategy) -> Draft:
        lines = self._follow(texts)
        found, weight = self._occurrences(lines)
        return _tree(self._continuations(found, strategy.depth), weight, strategy)

    def _follow(self, texts: Many[Text]) -> Array:
        """Take in what the texts have gained since the last time -> their lines."""
        lines = np.array([self._line_of[t.request.id] for t in texts])
        fresh, where = [], []
        for line, known, text in zip(lines.tolist(), self._lengths[lines].tolist(), texts, strict=True):
            new = text.tokens[known:]
            if new:
                start = line * self.width + known
                self._texts[start : start + len(new)] = new
                self._lengths[line] = known + len(new)
                fresh.append(np.arange(start, start + len(new)))
                where.append(np.full(len(new), line))
        if fresh:
            self._remember(np.concatenate(fresh), np.concatenate(where))
        return lines

    def _remember(self, ends: Array, lines: Array) -> None:
        """Point at these places, each the one behind a run, now that something is there."""
        for n in GRAMS:
            long = ends - lines * self.width >= n
            at = ends[long]
            buckets = self._buckets(at, lines[long], n)
            for some in _distinct(buckets):
                self._table[buckets[some], 1:] = self._table[buckets[some], :-1]
                self._table[buckets[some], 0] = at[some]

    def _buckets(self, ends: Array, lines: Array, n: int) -> Array:
        """Where in the table the run of n tokens before each place belongs, given its prompt."""
        runs = self._texts[ends[:, None] - n + np.arange(n)].astype(np.uint64)
        with np.errstate(over="ignore"):
            mixed = ((runs * self._powers[:n]).sum(1, dtype=np.uint64) + self._prompts[lines] + np.uint64(n)) * _MIX
        return (mixed >> np.uint64(64 - self._bits)).astype(np.int64)

    def _occurrences(self, lines: Array) -> tuple[Array, Array]:
        """Places [texts, candidates] at which a run equal to each text's last one ended (-1: none), and their weights:
        longer runs count for more than any number of shorter ones."""
        ends = lines * self.width + self._lengths[lines]
        found, weights = [], []
        for n in GRAMS:
            long = self._lengths[lines] >= n
            at = np.where(long, ends, n)
            places = self._table[self._buckets(at, lines, n)].astype(np.int64)  # [texts, WAYS]
            other = places // self.width
            back = np.arange(n) - n
            # The table only hints: the run must be there, in an answer to the same prompt, with something behind it.
            real = long[:, None] & (places >= 0) & (self._prompts[other] == self._prompts[lines][:, None])
            real &= (places - other * self.width < self._lengths[other]) & (places - other * self.width >= n)
            safe = np.where(real, places, n)
            real &= (self._texts[safe[..., None] + back] == self._texts[at[:, None] + back][:, None]).all(-1)
            found.append(np.where(real, places, -1))
            weights.append(np.where(real, float(n**3), 0.0))
        return np.concatenate(found, 1), np.concatenate(weights, 1)

    def _continuations(self, found: Array, depth: int) -> Array:
        """The tokens [texts, candidates, depth] behind each occurrence; -1 beyond the end of its text."""
        safe = np.maximum(found, 0)
        places = safe[..., None] + np.arange(depth)
        line = safe // self.width
        there = (found >= 0)[..., None] & (places < (line * self.width + self._lengths[line])[..., None])
        return np.where(there, self._texts[np.minimum(places, self._texts.size - 1)], -1)


def _distinct(keys: Array) -> list[Array]:
    """Indices in portions without repeated keys, in order; of a key that comes often, the last few occurrences."""
    order = keys.argsort(kind="stable")
    ordered = keys[order]
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else np.zeros(0, np.int64)
    counts = np.diff(np.r_[first, len(keys)])
    if len(first) == len(keys):
        return [order] if len(keys) else []
    to_come = np.repeat(first + counts, counts) - np.arange(len(keys))  # of the same key, itself included
    return [order[to_come == left] for left in range(min(WAYS, counts.max()), 0, -1)]


def _tree(tokens: Array, weight: Array, strategy: Strategy) -> Draft:
    """Join continuations [texts, candidates, depth] into trees, and keep the nodes that most of their weight goes
    through. A node is the first candidate with a given beginning; its weight is that of all that begin so."""
    texts, candidates, _ = tokens.shape
    draft = Draft.empty(texts, strategy.nodes)
    same = (tokens[:, :, None] == tokens[:, None]) & (tokens[:, :, None] >= 0)
    same = np.logical_and.accumulate(same, 3)  # [texts, i, j, depth]: i and j begin alike up to here
    through = (same * weight[:, None, :, None]).sum(2)  # [texts, candidates, depth]
    if strategy.chain:
        best = through.sum(2).argmax(1)
        draft.tokens[:] = tokens[np.arange(texts), best]
        return draft
    first = same.argmax(2)  # [texts, candidates, depth]: who stands for this beginning
    own = (first == np.arange(candidates)[:, None]) & (through > 0)
    # By weight, shallow before deep: a parent's weight is at least its child's, so parents come first.
    order = np.where(own, -through, np.inf).transpose(0, 2, 1).reshape(texts, -1).argsort(1, kind="stable")
    for b in range(texts):
        numbers: dict[tuple[int, int], int] = {}
        count = 0
        for place in order[b, : strategy.nodes].tolist():
            level, i = divmod(place, candidates)
            if not own[b, i, level]:
                break
            parent = 0 if level == 0 else numbers[(int(first[b, i, level - 1]), level - 1)]
            draft.tokens[b, count], draft.parents[b, count] = tokens[b, i, level], parent
            count += 1
            numbers[(i, level)] = count
        draft.parents[b, count:] = 0
    return draft
