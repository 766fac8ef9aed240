"""Guesses from what was written before: when the last few tokens have occurred earlier, what came next may come again.

Matches are looked for in the text itself, in the answers that are being written to the same prompt, and in earlier
answers to it; a prompt never sees another prompt's answers. All texts lie in one array, and a hash table with a fixed
number of places per key points behind late occurrences of each run of 4, 2 and 1 tokens. Both have a fixed size,
so memory is bounded; old answers are overwritten.

A round waits for `propose`, so all that does is look up; `follow` fills the table while the device works. The table is
then some rounds late, which hardly matters: a text's last tokens are read from the text itself. Looking up goes text by
text in plain Python, because a few lookups are cheaper than any number of operations on small arrays; taking in goes
over all texts at once, because there are many tokens and nobody waits for the first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from paceline.draft.base import BaseDrafter, Draft, DrafterSetup, DraftSequence
from paceline.draft.strategy import MAX_NODES, Strategy

if TYPE_CHECKING:
    from paceline.config import SpeculationConfig

GRAMS = (4, 2, 1)  # down to one token: to check a poor guess costs no more than to check none
WAYS = 4  # occurrences that are remembered of each run, late ones mostly
MULTIPLIER = 0x3A8F  # of a run's key; small, so that the keys of most vocabularies are small integers to Python
LATE = 32  # tokens; a text that is further ahead of what is known of it is taken in before its guess


@dataclass(slots=True)
class _Line:
    """Where a text that runs is kept."""

    start: int
    prompt: int
    known: int = 0  # tokens that have been taken in


class SuffixDrafter(BaseDrafter):
    name = "suffix"
    default_strategies = ("suffix:3", "suffix:8", "suffix:6x3/12")

    def __init__(self, max_batch: int, max_length: int, memory_bytes: int = 64 * 2**20):
        self.max_length = max_length
        self._stride = max_length + MAX_NODES  # the rest stays empty, so that no guess runs into the next line
        # Half for texts, half for the table; in any case room for those that run. Places are 32 bits.
        self.lines = max(2 * max_batch, min(memory_bytes // 2 // 4, 2**31 - 1) // self._stride)
        buckets = 1 << (max(1024, memory_bytes // 2 // (4 * WAYS)).bit_length() - 1)
        self._mask = buckets - 1
        self._texts = array("i", [-1]) * (self.lines * self._stride)
        self._table = array("i", [0]) * (buckets * WAYS)  # 0 is nowhere: there is no run in front of it
        self._prompts = array("q", [0]) * self.lines
        self._taken = bytearray(self.lines)
        self._text_view = np.frombuffer(self._texts, np.int32)  # the same memory
        self._table_view = np.frombuffer(self._table, np.int32)
        self._next = 0
        self._ended: list[tuple[_Line, list[int]]] = []  # whose last tokens have not been taken in yet
        self._running: dict[int, _Line] = {}  # by request
        self._first: dict[int, int] = {}  # prompt -> the line that it was taken in with

    @classmethod
    def is_enabled(cls, settings: SpeculationConfig, has_network: bool) -> bool:
        return settings.suffix

    @classmethod
    def make(cls, setup: DrafterSetup) -> BaseDrafter:
        return cls(setup.max_batch, setup.max_length, int(setup.settings.suffix_mb * 2**20))

    @property
    def memory_bytes(self) -> int:
        return sum(memoryview(part).nbytes for part in (self._texts, self._table, self._prompts, self._taken))

    def begin(self, texts: Many[DraftSequence]) -> None:
        for text in texts:
            # Those that come back after a pause have a line; those that there is no room for get no guesses.
            if len(self._running) + len(self._ended) == self.lines:
                self.follow(())  # the lines of those that have ended are free after that
            if text.request.id not in self._running and len(self._running) < self.lines:
                self._running[text.request.id] = self._new_line(text.request.prompt)

    def follow(self, texts: Many[DraftSequence]) -> None:
        running, self._ended, ended = self._running, [], self._ended
        lines = [(running[t.request.id], t.tokens) for t in texts if t.request.id in running]
        self._take_in(lines + ended)
        for line, _ in ended:
            self._taken[line.start // self._stride] = False

    def finish(self, texts: Many[DraftSequence]) -> None:
        for text in texts:
            line = self._running.pop(text.request.id, None)
            if line:
                self._ended.append((line, text.tokens))

    def propose(self, texts: Many[DraftSequence], strategy: Strategy) -> Draft:
        draft = Draft.empty(len(texts), strategy.nodes)
        is_chain, depth = strategy.chain, strategy.depth
        tokens, parents = array("i"), array("i")
        nothing, roots = array("i", [-1]) * strategy.nodes, array("i", [0]) * strategy.nodes
        running, longest = self._running, self.max_length
        for text in texts:
            line, written = running.get(text.request.id), text.tokens
            if line is None or len(written) > longest:
                tokens += nothing
                parents += roots
                continue
            if len(written) - line.known > LATE:
                self.follow(texts)
            if is_chain:
                tokens += self._chain(line, written, depth) or nothing
            else:
                nodes, above = self._tree(line, written, strategy)
                tokens += nodes + nothing[len(nodes) :]
                parents += above + roots[len(nodes) :]
        draft.tokens.ravel()[:] = tokens
        if not is_chain:
            draft.parents.ravel()[:] = parents
        return draft

    def _new_line(self, prompt: tuple[int, ...]) -> _Line:
        while self._taken[self._next]:
            self._next = (self._next + 1) % self.lines
        number, self._next = self._next, (self._next + 1) % self.lines
        line = _Line(number * self._stride, hash(prompt))  # a hash of integers is the same in every process
        self._texts[line.start : line.start + self._stride] = array("i", [-1]) * self._stride
        if self._first.get(self._prompts[number]) == number:
            del self._first[self._prompts[number]]
        if self._first.setdefault(line.prompt, number) != number:
            # A prompt is taken in once: its copies would only crowd out what differs.
            line.known = min(len(prompt), self.max_length)
            self._texts[line.start : line.start + line.known] = array("i", prompt[: line.known])
        self._prompts[number], self._taken[number] = line.prompt, True
        return line

    def _take_in(self, lines: list[tuple[_Line, list[int]]]) -> None:
        """Copy what the texts have gained, and point at each place that now has something behind a run."""
        most, lead = self.max_length, GRAMS[0]
        grown = [(line, tokens) for line, tokens in lines if line.known < min(len(tokens), most)]
        if not grown:
            return
        # What is new of each text, behind the tokens before it that its first runs begin with.
        first = np.array([line.known for line, _ in grown])
        begin = np.maximum(first - lead, 0)
        parts = [tokens[b:most] for (_, tokens), b in zip(grown, begin.tolist(), strict=True)]
        lengths = np.array([len(part) for part in parts])
        flat = np.fromiter(chain.from_iterable(parts), np.int64, int(lengths.sum()))
        ends = lengths.cumsum()
        index = np.arange(len(flat)) + np.repeat(begin - ends + lengths, lengths)  # in its own text
        place = index + np.repeat(np.array([line.start for line, _ in grown]), lengths)
        prompt = np.repeat(np.array([line.prompt for line, _ in grown]), lengths)
        fresh = index >= np.repeat(first, lengths)
        self._text_view[place[fresh]] = flat[fresh]
        for n in GRAMS:
            at = (fresh & (index >= n)).nonzero()[0]
            key = flat[at - n]
            for i in range(n - 1, 0, -1):
                key = key * MULTIPLIER + flat[at - i]
            there = place[at]
            # One of the key's places, by turns: to keep them in order would cost more than it is worth.
            self._table_view[((key ^ prompt[at]) & self._mask) * WAYS + there % WAYS] = there
        for (line, _), begun, length in zip(grown, begin.tolist(), lengths.tolist(), strict=True):
            line.known = begun + length

    def _chain(self, line: _Line, tokens: list[int], depth: int) -> array[int]:
        """What is behind an occurrence of the longest run that has any, one that goes on as most of them do."""
        prompt, texts, prompts, stride = line.prompt, self._texts, self._prompts, self._stride
        for n in GRAMS:
            run = tokens[-n:]
            at = ((_key(run) ^ prompt) & self._mask) * WAYS
            best = 0
            votes: list[int] = []
            for place in self._table[at : at + WAYS]:
                # As in _matches, which would look at all of them.
                if (
                    place
                    and (token := texts[place]) >= 0
                    and texts[place - n : place].tolist() == run
                    and prompts[place // stride] == prompt
                ):
                    if token in votes:  # twice: of four votes, no other token can have more
                        best = place
                        break
                    best = best or place
                    votes.append(token)
            if best:
                back = line.start + len(tokens) - best
                if 0 < back < depth:  # the text repeats itself, and goes on doing so
                    return array("i", (tokens[-back:] * depth)[:depth])
                return texts[best : best + depth]
        return array("i")

    def _matches(self, line: _Line, tokens: list[int]) -> dict[int, int]:
        """Places behind earlier occurrences of what the text ends with, and how many tokens of it: longest first, then
        latest. The table only hints: the run must be there, in an answer to the same prompt, with something behind it.
        """
        prompt, texts, prompts, stride = line.prompt, self._texts, self._prompts, self._stride
        found: dict[int, int] = {}
        for n in GRAMS:
            run = tokens[-n:]
            at = ((_key(run) ^ prompt) & self._mask) * WAYS
            for place in self._table[at : at + WAYS]:
                if (
                    place
                    and place not in found
                    and prompts[place // stride] == prompt
                    and texts[place] >= 0
                    and texts[place - n : place].tolist() == run
                ):
                    found[place] = n
        return found

    def _tree(self, line: _Line, tokens: list[int], strategy: Strategy) -> tuple[array[int], array[int]]:
        """Join what is behind the matches, and keep the nodes that weigh most -> their tokens and parents. Longer runs
        weigh more than any number of shorter ones. A level weighs half of the one above it: what is nearer is reached
        more often, and parents come before their children."""
        texts, depth = self._texts, strategy.depth
        numbers: dict[tuple[int, int], int] = {}  # by parent and token; 0 is the text's last token
        weights = [0.0]
        for place, n in self._matches(line, tokens).items():
            parent, weight = 0, float(n**3)
            for token in texts[place : place + depth]:
                if token < 0:
                    break
                node = parent, token
                if node in numbers:
                    parent = numbers[node]
                    weights[parent] += weight
                else:
                    numbers[node] = parent = len(weights)
                    weights.append(weight)
                weight /= 2
        nodes = list(numbers)
        kept, parents, renumbered = array("i"), array("i"), {0: 0}
        for number in sorted(range(1, len(weights)), key=weights.__getitem__, reverse=True)[: strategy.nodes]:
            parent, token = nodes[number - 1]
            kept.append(token)
            parents.append(renumbered[parent])
            renumbered[number] = len(kept)
        return kept, parents


def _key(run: list[int]) -> int:
    """Of 4, 2 or 1 tokens: a polynomial, written out because it is asked for all the time."""
    if len(run) == 4:
        a, b, c, d = run
        return ((a * MULTIPLIER + b) * MULTIPLIER + c) * MULTIPLIER + d
    return run[0] * MULTIPLIER + run[1] if len(run) == 2 else run[0]
