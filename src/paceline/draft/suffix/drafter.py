"""Drafts without a model: where the last few tokens have occurred before, what followed them then may follow again.

Matches are searched in the sequence itself, in the other samples of its group, and in earlier completions of the same
prompt; a prompt never sees another prompt's completions. All sequences lie in one array, and a hash table with a fixed
number of entries per key points behind late occurrences of each n-gram of 4, 2 and 1 tokens. Both have a fixed size, so
memory is bounded; old completions are overwritten.

A round waits for `propose`, so it only looks up; `follow` fills the table while the device works. The table is
then some rounds late, which hardly matters: a sequence's last tokens are read from the sequence itself. Lookups go
sequence by sequence in plain Python, because a few lookups are cheaper than any number of operations on small arrays;
indexing goes over all sequences at once, because there are many tokens and nobody waits for the first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from paceline.draft.base import BaseDrafter, Draft, DrafterSetup, DraftSequence
from paceline.draft.strategy import MAX_TREE_NODES, Strategy

if TYPE_CHECKING:
    from paceline.config import SpeculationConfig

GRAMS = (4, 2, 1)  # tokens; down to one: verifying a poor draft costs no more than verifying none
OCCURRENCES = 4  # table entries per n-gram, of late occurrences mostly
MULTIPLIER = 0x3A8F  # of an n-gram's key; small, so that the keys of most vocabularies are small integers to Python
LATE = 32  # tokens; a sequence with more that are not indexed yet is indexed before its draft


@dataclass(slots=True)
class _Line:
    """Where a running sequence is kept."""

    start: int
    prompt: int
    known: int = 0  # tokens that have been indexed


class SuffixDrafter(BaseDrafter):
    name = "suffix"
    default_strategies = ("suffix:3", "suffix:8", "suffix:6x3/12")

    def __init__(self, max_batch: int, max_length: int, memory_bytes: int = 64 * 2**20):
        self.max_length = max_length
        self._stride = max_length + MAX_TREE_NODES  # the rest stays empty, so that no draft runs into the next line
        # Half for sequences, half for the table; in any case enough for those that run. Positions are 32 bits.
        self.lines = max(2 * max_batch, min(memory_bytes // 2 // 4, 2**31 - 1) // self._stride)
        buckets = 1 << (max(1024, memory_bytes // 2 // (4 * OCCURRENCES)).bit_length() - 1)
        self._mask = buckets - 1
        self._tokens = array("i", [-1]) * (self.lines * self._stride)
        self._table = array("i", [0]) * (buckets * OCCURRENCES)  # 0 is nowhere: there is no n-gram in front of it
        self._prompts = array("q", [0]) * self.lines
        self._taken = bytearray(self.lines)
        self._token_view = np.frombuffer(self._tokens, np.int32)  # the same memory
        self._table_view = np.frombuffer(self._table, np.int32)
        self._next = 0
        self._ended: list[tuple[_Line, list[int]]] = []  # whose last tokens have not been indexed yet
        self._running: dict[int, _Line] = {}  # by request
        self._first: dict[int, int] = {}  # prompt -> the line that it was indexed with

    @classmethod
    def is_enabled(cls, settings: SpeculationConfig, has_network: bool) -> bool:
        return settings.suffix

    @classmethod
    def make(cls, setup: DrafterSetup) -> BaseDrafter:
        return cls(setup.max_batch, setup.max_length, int(setup.settings.suffix_mb * 2**20))

    @property
    def memory_bytes(self) -> int:
        return sum(memoryview(part).nbytes for part in (self._tokens, self._table, self._prompts, self._taken))

    def begin(self, sequences: Many[DraftSequence]) -> None:
        for sequence in sequences:
            # Those that come back after a pause have a line; those that no line is left for get no drafts.
            if len(self._running) + len(self._ended) == self.lines:
                self.follow(())  # the lines of those that have ended are free after that
            if sequence.request.id not in self._running and len(self._running) < self.lines:
                self._running[sequence.request.id] = self._new_line(sequence.request.prompt)

    def follow(self, sequences: Many[DraftSequence]) -> None:
        running, self._ended, ended = self._running, [], self._ended
        lines = [(running[t.request.id], t.tokens) for t in sequences if t.request.id in running]
        self._index(lines + ended)
        for line, _ in ended:
            self._taken[line.start // self._stride] = False

    def finish(self, sequences: Many[DraftSequence]) -> None:
        for sequence in sequences:
            line = self._running.pop(sequence.request.id, None)
            if line:
                self._ended.append((line, sequence.tokens))

    def propose(self, sequences: Many[DraftSequence], strategy: Strategy) -> Draft:
        draft = Draft.empty(len(sequences), strategy.nodes)
        is_chain = strategy.chain
        depth = strategy.depth
        tokens, parents = array("i"), array("i")
        nothing = array("i", [-1]) * strategy.nodes
        roots = array("i", [0]) * strategy.nodes
        running = self._running
        longest = self.max_length
        for sequence in sequences:
            line = running.get(sequence.request.id)
            written = sequence.tokens
            if line is None or len(written) > longest:
                tokens += nothing
                parents += roots
                continue
            if len(written) - line.known > LATE:
                self.follow(sequences)
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
        self._tokens[line.start : line.start + self._stride] = array("i", [-1]) * self._stride
        if self._first.get(self._prompts[number]) == number:
            del self._first[self._prompts[number]]
        if self._first.setdefault(line.prompt, number) != number:
            # A prompt is indexed once: its copies would only displace what differs.
            line.known = min(len(prompt), self.max_length)
            self._tokens[line.start : line.start + line.known] = array("i", prompt[: line.known])
        self._prompts[number] = line.prompt
        self._taken[number] = True
        return line

    def _index(self, lines: list[tuple[_Line, list[int]]]) -> None:
        """Copy what the sequences have gained, and point at each position that now follows an n-gram."""
        most = self.max_length
        lead = GRAMS[0]
        grown = [(line, tokens) for line, tokens in lines if line.known < min(len(tokens), most)]
        if not grown:
            return
        # What is new of each sequence, behind the tokens before it that its first n-grams begin with.
        first = np.array([line.known for line, _ in grown])
        begin = np.maximum(first - lead, 0)
        parts = [tokens[b:most] for (_, tokens), b in zip(grown, begin.tolist(), strict=True)]
        lengths = np.array([len(part) for part in parts])
        flat = np.fromiter(chain.from_iterable(parts), np.int64, int(lengths.sum()))
        ends = lengths.cumsum()
        index = np.arange(len(flat)) + np.repeat(begin - ends + lengths, lengths)  # in its own sequence
        position = index + np.repeat(np.array([line.start for line, _ in grown]), lengths)
        prompt = np.repeat(np.array([line.prompt for line, _ in grown]), lengths)
        fresh = index >= np.repeat(first, lengths)
        self._token_view[position[fresh]] = flat[fresh]
        for n in GRAMS:
            at = (fresh & (index >= n)).nonzero()[0]
            key = flat[at - n]
            for i in range(n - 1, 0, -1):
                key = key * MULTIPLIER + flat[at - i]
            there = position[at]
            # One of the key's entries, by turns: to keep them in order would cost more than it is worth.
            self._table_view[((key ^ prompt[at]) & self._mask) * OCCURRENCES + there % OCCURRENCES] = there
        for (line, _), begun, length in zip(grown, begin.tolist(), lengths.tolist(), strict=True):
            line.known = begun + length

    def _chain(self, line: _Line, tokens: list[int], depth: int) -> array[int]:
        """What follows an occurrence of the longest n-gram that has any, one that goes on as most of them do."""
        prompt = line.prompt
        kept = self._tokens
        prompts = self._prompts
        stride = self._stride
        for n in GRAMS:
            run = tokens[-n:]
            at = ((_key(run) ^ prompt) & self._mask) * OCCURRENCES
            best = 0
            votes: list[int] = []
            for position in self._table[at : at + OCCURRENCES]:
                # As in _matches, which would look at all of them.
                if (
                    position
                    and (token := kept[position]) >= 0
                    and kept[position - n : position].tolist() == run
                    and prompts[position // stride] == prompt
                ):
                    if token in votes:  # twice: of four votes, no other token can have more
                        best = position
                        break
                    best = best or position
                    votes.append(token)
            if best:
                back = line.start + len(tokens) - best
                if 0 < back < depth:  # the sequence repeats itself, and goes on doing so
                    return array("i", (tokens[-back:] * depth)[:depth])
                return kept[best : best + depth]
        return array("i")

    def _matches(self, line: _Line, tokens: list[int]) -> dict[int, int]:
        """Positions behind earlier occurrences of what the sequence ends with, and how many tokens of it: longest
        first, then latest. The table only hints: the n-gram must be there, in a completion of the same prompt, with a
        token behind it."""
        prompt = line.prompt
        kept = self._tokens
        prompts = self._prompts
        stride = self._stride
        found: dict[int, int] = {}
        for n in GRAMS:
            run = tokens[-n:]
            at = ((_key(run) ^ prompt) & self._mask) * OCCURRENCES
            for position in self._table[at : at + OCCURRENCES]:
                if (
                    position
                    and position not in found
                    and prompts[position // stride] == prompt
                    and kept[position] >= 0
                    and kept[position - n : position].tolist() == run
                ):
                    found[position] = n
        return found

    def _tree(self, line: _Line, tokens: list[int], strategy: Strategy) -> tuple[array[int], array[int]]:
        """Join what follows the matches, and keep the nodes that weigh most -> their tokens and parents. Longer n-grams
        weigh more than any number of shorter ones. A level weighs half of the one above it: what is nearer is reached
        more often, and parents come before their children."""
        kept = self._tokens
        depth = strategy.depth
        numbers: dict[tuple[int, int], int] = {}  # by parent and token; 0 is the sequence's last token
        weights = [0.0]
        for position, n in self._matches(line, tokens).items():
            parent = 0
            weight = float(n**3)
            for token in kept[position : position + depth]:
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
        kept = array("i")
        parents = array("i")
        renumbered = {0: 0}
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
