"""Who decodes, who waits, and who owns which pages.

Requests are admitted in order while there are pages for them. The prompt of a group is computed once: its full pages
are shared, the last, partly filled one is copied for each sample. When pages run out while decoding, the request that
was admitted last is paused: it loses its pages and waits at the front of the queue; later it is computed again from its
tokens and goes on exactly as it would have, because a token depends on its position and not on its history.

A request whose turn has ended is suspended until it is told what that led to. Its row and its slot are for others
meanwhile; its pages stay, so that only what is new has to be computed, unless somebody runs out of pages.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from paceline.core import Request
from paceline.rollout.pages import PagePool
from paceline.rollout.rows import Rows
from paceline.rollout.sequence import Sequence


@dataclass(eq=False)
class Prefix:
    """A prompt that several requests share, kept until the last of them has been admitted."""

    pages: list[int]
    filled: Any = None
    """What its prefill returned: the state that the first token of every sample is drawn from."""


@dataclass
class Fill:
    """Tokens that have to go through the model to fill pages, for a shared prompt or for one sequence."""

    tokens: list[int]
    pages: list[int]
    owner: Prefix | Sequence
    ahead: int = 0
    """How many of the tokens, at the end, were written ahead and are yet to be verified."""
    row: int = -1
    """Of the owner, if it is a sequence."""
    start: int = 0
    """Position of the first of the tokens: those before it are in the pages already."""


@dataclass
class Admission:
    sequences: list[Sequence] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    prefixes: dict[int, Prefix] = field(default_factory=dict)  # by index in `sequences`
    copies: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """Page -> how many of its slots, and the pages they are copied to once the fills are done."""


class Scheduler:
    def __init__(self, pool: PagePool, rows: Rows, max_batch: int, prefill_tokens: int):
        self.pool = pool
        self.rows = rows
        self.max_batch = max_batch
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # index = row
        self.suspended: dict[int, Sequence] = {}
        """By request: those that wait for an observation, the latest last."""
        self.paused = 0
        self.changes = 0
        """Counts changes to the rows other than a token more each: what is derived from them holds while it stands."""
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._fresh: Counter[tuple[int, ...]] = Counter()  # fresh requests that wait, by prompt
        self._admissions = 0
        self._slots = list(range(max_batch, 0, -1))  # 0 is scratch, as it is with pages

    def submit(self, request: Request, ahead: Many[int] = ()) -> None:
        """`ahead` is what may follow its prompt."""
        seq = Sequence.of(request, ahead)
        self.waiting.append(seq)
        if seq.only_prompt:
            self._fresh[request.prompt] += 1

    def release(self, count: int) -> list[Request]:
        """Let go of up to `count` requests that have not begun, from the end of the queue."""
        gone = [seq for seq in reversed(self.waiting) if seq.fresh][:count]
        self.waiting = deque(seq for seq in self.waiting if seq not in gone)
        for seq in gone:
            if seq.only_prompt:
                self._fresh[seq.request.prompt] -= 1
        self.release_prefixes()
        return [seq.request for seq in gone]

    def admit(self) -> Admission:
        """Take waiting requests into the batch, as many as fit into pages, rows and one prefill pass."""
        out = Admission()
        filled = 0
        while self.waiting and len(self.running) < self.max_batch:
            seq = self.waiting[0]
            prefix = self._prefixes.get(seq.request.prompt) if seq.only_prompt else None
            cost = 0 if prefix else len(seq.tokens) + len(seq.ahead) - seq.cached
            if out.fills and filled + cost > self.prefill_tokens:
                break
            given = self._give_pages(seq, prefix, out)
            while not given and self._lend_pages(seq):
                given = self._give_pages(seq, prefix, out)
            if not given:
                if self.running:
                    break
                # Nothing runs, so only prompts that wait for the rest of their group hold pages, and the sequence
                # itself: let go of them.
                self._drop_prefixes()
                self._let_go(seq)
                given = self._give_pages(seq, None, out, share=False)
                assert given, "submit() checks that a request alone always fits"
            filled += cost
            self.waiting.popleft()
            self._enter(seq)
        return out

    def _give_pages(self, seq: Sequence, prefix: Prefix | None, out: Admission, share: bool = True) -> bool:
        """Give a sequence its pages, if there are enough; one page per running request is kept back to grow into."""
        length = len(seq.tokens) + len(seq.ahead)
        full = length // self.pool.page_size
        spare = self.pool.free - len(self.running)
        if seq.pages:  # it goes on behind what is in them
            new = self.pool.needed(length + 1) - len(seq.pages)
            if new > spare:
                return False
            seq.pages += self.pool.take(new)
            out.fills.append(Fill(seq.tokens[seq.cached :], seq.pages, seq, 0, len(self.running), seq.cached))
            out.sequences.append(seq)
            return True
        share = share and seq.only_prompt and (prefix is not None or self._fresh[seq.request.prompt] > 1)
        own = self.pool.needed(length + 1) - (full if share else 0)
        first = share and prefix is None
        if own + (self.pool.needed(length) if first else 0) > spare:
            return False
        if first:
            prefix = Prefix(self.pool.take(self.pool.needed(length)))
            self._prefixes[seq.request.prompt] = prefix
            out.fills.append(Fill(seq.tokens, prefix.pages, prefix))
        if share:
            assert prefix is not None
            seq.pages = self.pool.share(prefix.pages[:full]) + self.pool.take(own)
            out.prefixes[len(out.sequences)] = prefix
            if length % self.pool.page_size:
                _, targets = out.copies.setdefault(prefix.pages[full], (length % self.pool.page_size, []))
                targets.append(seq.pages[full])
        else:
            seq.pages = self.pool.take(own)
            out.fills.append(Fill(seq.tokens + seq.ahead, seq.pages, seq, len(seq.ahead), len(self.running)))
        out.sequences.append(seq)
        return True

    def _enter(self, seq: Sequence) -> None:
        if seq.only_prompt:
            self._fresh[seq.request.prompt] -= 1
        seq.filled_from = seq.cached
        seq.cached = 0
        seq.suspended = False
        self._admissions += 1
        seq.admitted = self._admissions
        seq.slot = self._slots.pop()
        self.running.append(seq)
        self.rows.put(len(self.running) - 1, seq)
        self.changes += 1

    def verified(self, row: int) -> None:
        """The tokens written ahead of a sequence that has just been admitted are verified, and it has those that were
        accepted: give back the pages of the others, but for the next token's."""
        seq = self.running[row]
        seq.ahead = []
        needed = self.pool.needed(len(seq.tokens) + 1)
        self.pool.release(seq.pages[needed:])
        seq.pages = seq.pages[:needed]
        self.rows.drop_pages(row)
        self.rows.put(row, seq)

    def release_prefixes(self) -> None:
        """After an admission has been carried out: release prompts that no waiting request shares any more."""
        for prompt in [p for p in self._prefixes if not self._fresh[p]]:
            self.pool.release(self._prefixes.pop(prompt).pages)
            del self._fresh[prompt]

    def reserve(self, new: int = 1) -> None:
        """Make sure that every running request has a page for its next token, pausing the latest if need be, and, if
        it can be had without pausing anyone, slots for `new` tokens."""
        for seq in self._crossing(1):
            # The last token is not in the cache yet; the next pass puts it there.
            need = self.pool.needed(len(seq.tokens)) - len(seq.pages)
            if need <= 0 or not seq.pages:  # no pages: paused for the sake of an earlier one
                continue
            while need > self.pool.free:
                if self._prefixes:
                    self._drop_prefixes()
                    continue
                if self._lend_pages():
                    continue
                self._pause(max(self.running, key=lambda s: s.admitted))
                if not seq.pages:
                    break
            else:
                self._grow(seq, need)
        if new > 1:
            most = self.rows.table.shape[1]
            for seq in self._crossing(new):
                need = min(self.pool.needed(len(seq.tokens) - 1 + new), most) - len(seq.pages)
                if 0 < need <= self.pool.free:
                    self._grow(seq, need)

    def _crossing(self, new: int) -> list[Sequence]:
        """Those whose next tokens cross into a new page: no other can need one."""
        count = len(self.running)
        size = self.pool.page_size
        offsets = self.rows.context[:count] % size
        return [self.running[i] for i in ((offsets == 0) | (offsets + new > size)).nonzero()[0]]

    def _grow(self, seq: Sequence, pages: int) -> None:
        seq.pages += self.pool.take(pages)
        self.rows.put_pages(self.running.index(seq), seq)
        self.changes += 1

    def compact(self) -> None:
        """Keep the pages in use close together."""
        moves = self.pool.compact()
        if not moves:
            return
        holders: list[Sequence | Prefix] = [*self.running, *self._keeping_pages(), *self._prefixes.values()]
        for holder in holders:
            holder.pages = [moves.get(page, page) for page in holder.pages]
        for row, seq in enumerate(self.running):
            self.rows.put_pages(row, seq)
        self.changes += 1

    def _pause(self, seq: Sequence) -> None:
        assert not seq.fresh, "a running request has drawn a token"
        self.paused += 1
        self.remove(self.running.index(seq))
        self.waiting.appendleft(seq)

    def pause_all(self) -> None:
        """Send every running request back to the queue, in order."""
        for seq in sorted(self.running, key=lambda s: -s.admitted):
            self._pause(seq)

    # Between two turns

    def suspend(self, seq: Sequence) -> None:
        """Its turn has ended. Its row is removed when no round in flight computes it any more."""
        self.suspended[seq.request.id] = seq

    def resume(self, request_id: int) -> Sequence:
        """It has been told what its turn led to, and goes on before others begin."""
        seq = self.suspended.pop(request_id)
        self.waiting.appendleft(seq)
        return seq

    def drop(self, request_id: int) -> Sequence:
        """It ended with its turn."""
        seq = self.suspended.pop(request_id)
        seq.suspended = False
        if seq not in self.running:  # otherwise they go with its row
            self._let_go(seq)
        return seq

    def _keeping_pages(self) -> list[Sequence]:
        """Sequences that keep pages without running."""
        return [s for s in (*self.waiting, *self.suspended.values()) if s.pages and s not in self.running]

    def _lend_pages(self, asking: Sequence | None = None) -> bool:
        """Have a sequence that waits, for an observation rather than for its row, let go of its pages, if one that is
        not `asking` keeps any: the one that has waited least, which is the last to go on. No round is in flight."""
        keeping = [seq for seq in self._keeping_pages() if seq is not asking]
        if keeping:
            self._let_go(keeping[-1])
        return bool(keeping)

    def _let_go(self, seq: Sequence) -> None:
        """Of its pages: it will be computed again."""
        self.pool.release(seq.pages)
        seq.pages = []
        seq.cached = 0

    def remove(self, row: int) -> Sequence:
        """Take a sequence out of the batch and free its pages; if it is suspended, those without tokens."""
        seq = self.running[row]
        last = len(self.running) - 1
        self._slots.append(seq.slot)
        kept = self.pool.needed(seq.cached) if seq.suspended else 0
        self.pool.release(seq.pages[kept:])
        seq.pages = seq.pages[:kept]
        self.running[row] = self.running[last]
        self.running.pop()
        self.rows.drop(row, last)
        self.changes += 1
        return seq

    def _drop_prefixes(self) -> None:
        for prefix in self._prefixes.values():
            self.pool.release(prefix.pages)
        self._prefixes.clear()

    def clear(self) -> None:
        """Forget every request, wherever it is."""
        while self.running:
            self.remove(len(self.running) - 1)
        for seq in self._keeping_pages():
            self._let_go(seq)
        self.suspended.clear()
        self.waiting.clear()
        self._fresh.clear()
        self._drop_prefixes()
