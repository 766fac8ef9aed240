"""The running batch as the device sees it: one row of numbers per request.

A row holds the last token, the length of the context, the sampling parameters, the state of each drafter's cache, and
the page table. All rows lie in one int32 tensor, so that a round uploads the batch in a single copy; on a CPU the
tensor is used where it is. Rows behind the last request are neutral: they point at the scratch page and may be computed
without harm, which is how a graph for 32 requests serves 29.

Where the device has rows of its own, a pass advances them by the tokens that it sampled, as the host does with its rows
once it has read those: so the next pass can be launched before.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core import MAX_BANNED
from paceline.draft.acceptance import FADE
from paceline.draft.base import Ints
from paceline.kernels.accept import advance_rows
from paceline.kernels.noise import request_key
from paceline.rollout.sampling import SamplingRows
from paceline.rollout.sequence import Sequence

TOKEN, CONTEXT, KEY, TEMPERATURE, TOP_K, TOP_P, MIN_P, MIN_LEFT, SLOT = 0, 1, 2, 4, 5, 6, 7, 8, 9
DRAFTERS = 10  # two columns for each drafter on the device, then the banned tokens and the page table


class DrafterColumns(NamedTuple):
    """The state of a drafter's cache; what its entries are is the drafter's affair."""

    cached: Tensor  # int32 [B] entries in its cache, those that fell out of its window counted
    start: Tensor  # int32 [B] first of them that can be seen


class RowsView(NamedTuple):
    tokens: Tensor  # int32 [B] last token of each request
    context: Tensor  # int32 [B] tokens in the KV cache
    table: Tensor  # int32 [B, most] pages
    slot: Tensor  # int32 [B] where drafters keep what belongs to each request; 0 is scratch
    sampling: SamplingRows
    drafters: tuple[DrafterColumns, ...]


class Rows:
    def __init__(
        self, capacity: int, most_pages: int, device: torch.device, apart: bool = False, num_drafters: int = 0
    ):
        """`apart` gives the device rows of its own, which a GPU has anyway. `num_drafters` are on the device."""
        self.num_drafters = max(1, num_drafters)  # so that columns are aligned in the same way with and without one
        self._banned = DRAFTERS + 2 * self.num_drafters
        self._table = self._banned + MAX_BANNED
        width = self._table + most_pages
        width += width % 2  # even, so that two columns can be read as one int64
        on_gpu = device.type == "cuda"
        self.apart = apart or on_gpu
        self.host = torch.zeros(capacity, width, dtype=torch.int32, pin_memory=on_gpu)
        self.device = torch.zeros_like(self.host, device=device) if self.apart else self.host
        self._ints = self.host.numpy()
        self._ints[:, self._banned : self._table] = -1
        self.token = self._ints[:, TOKEN]
        self.context = self._ints[:, CONTEXT]
        self.min_left = self._ints[:, MIN_LEFT]
        self.slot = self._ints[:, SLOT]
        self.table = self._ints[:, self._table :]
        self.ends = np.zeros(capacity, np.int64)
        """Tokens of the longest that each request can become; the device need not know."""
        self.reached = np.zeros(capacity)
        """Draft tokens verified behind accepted ones only, lately; neither need the device know."""
        self.accepted = np.zeros(capacity)
        """Those of them that were accepted."""

    def drafter_columns(self, index: int) -> tuple[Ints, Ints]:
        """The host's `DrafterColumns` of a drafter: cached and start."""
        first = DRAFTERS + 2 * index
        return self._ints[:, first], self._ints[:, first + 1]

    def put(self, row: int, seq: Sequence) -> None:
        s = seq.request.sampling
        ints = self._ints[row]
        self.ends[row] = len(seq.request.prompt) + s.max_tokens
        self.reached[row] = 0.0
        self.accepted[row] = 0.0
        ints[TOKEN] = seq.tokens[-1]
        ints[CONTEXT] = len(seq.tokens)
        ints[KEY : KEY + 2].view(np.int64)[0] = request_key(seq.request.seed, seq.request.id)
        ints[TOP_K] = s.top_k
        ints.view(np.float32)[[TEMPERATURE, TOP_P, MIN_P]] = s.temperature, s.top_p, s.min_p
        ints[MIN_LEFT] = max(0, s.min_tokens - seq.generated)
        ints[SLOT] = seq.slot
        ints[DRAFTERS : self._banned : 2] = len(seq.tokens)  # a prefill fills drafters' caches too
        ints[DRAFTERS + 1 : self._banned : 2] = seq.filled_from
        banned = list(s.stop_token_ids) if s.min_tokens and s.stop_token_ids else [-1]
        ints[self._banned : self._table] = banned + banned[:1] * (MAX_BANNED - len(banned))
        self.put_pages(row, seq)

    def put_pages(self, row: int, seq: Sequence) -> None:
        self.table[row, : len(seq.pages)] = seq.pages

    def drop_pages(self, row: int) -> None:
        self.table[row] = 0

    def drop(self, row: int, last: int) -> None:
        """Forget a row; the last one moves there."""
        for column in (self.ends, self.reached, self.accepted):
            column[row] = column[last]
        self._ints[row] = self._ints[last]
        self._ints[last] = 0
        self._ints[last, self._banned : self._table] = -1

    def count_accepted(self, accepted: Ints, depth: int) -> None:
        """So many draft tokens of each row's draft were accepted."""
        count = len(accepted)
        self.reached[:count] = FADE * self.reached[:count] + np.minimum(accepted + 1, depth)
        self.accepted[:count] = FADE * self.accepted[:count] + accepted

    def upload(self, count: int) -> None:
        if self.apart:
            self.device[:count].copy_(self.host[:count], non_blocking=True)

    def advance(
        self, count: int, sampled: Tensor, logprobs: Tensor, num_accepted: Tensor | None = None
    ) -> Tensor | None:
        """Where the device has rows of its own: the tokens [count, n] were sampled, of which the first
        1 + num_accepted [count] count, or the first -> all of it packed."""
        if not self.apart:
            return None
        rows = self.view(0, count)
        min_left = rows.sampling.min_left
        return advance_rows(rows.tokens, rows.context, rows.slot, min_left, sampled, logprobs, num_accepted)

    @functools.lru_cache(maxsize=512)  # noqa: B019 (views of one buffer that lives as long as the engine)
    def view(self, first: int, last: int) -> RowsView:
        """The rows [first, last) on the device, by column."""
        part = self.device[first:last]
        floats = part.view(torch.float32)
        sampling = SamplingRows(
            keys=part[:, KEY : KEY + 2].view(torch.int64)[:, 0],
            temperature=floats[:, TEMPERATURE],
            top_k=part[:, TOP_K],
            top_p=floats[:, TOP_P],
            min_p=floats[:, MIN_P],
            min_left=part[:, MIN_LEFT],
            banned=part[:, self._banned : self._table],
        )
        pairs = range(DRAFTERS, self._banned, 2)
        drafters = tuple(DrafterColumns(part[:, i], part[:, i + 1]) for i in pairs)
        return RowsView(part[:, TOKEN], part[:, CONTEXT], part[:, self._table :], part[:, SLOT], sampling, drafters)
