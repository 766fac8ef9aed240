"""The running batch as the device sees it: one row of numbers per request.

A row holds the last token, the length of the context, the sampling parameters, what a drafter has to know, and the
page table. All rows lie in one int32 tensor, so that a step uploads the batch in a single copy; on a CPU the tensor is
used where it is. Rows behind the last request are neutral: they point at the scratch page and may be computed without
harm, which is how a graph for 32 requests serves 29.

Where the device has rows of its own, a pass moves them on by what it has drawn, as the host does with its rows once it
has read that: so the next pass can begin before.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core import MAX_BANNED, Sequence
from paceline.kernels.accept import advance_rows
from paceline.kernels.noise import request_key
from paceline.rollout.sampling import SamplingRows

TOKEN, CONTEXT, KEY, TEMPERATURE, TOP_K, TOP_P, MIN_P, MIN_LEFT = 0, 1, 2, 4, 5, 6, 7, 8
SLOT, DRAFTED, START, BANNED = 9, 10, 11, 12
TABLE = BANNED + MAX_BANNED


class RowsView(NamedTuple):
    tokens: Tensor  # int32 [B] last token of each request
    context: Tensor  # int32 [B] tokens in the cache
    table: Tensor  # int32 [B, most] pages
    slot: Tensor  # int32 [B] where each request keeps its features
    drafted: Tensor  # int32 [B] entries in the drafter's cache
    start: Tensor  # int32 [B] first of them that can be seen
    sampling: SamplingRows


class Rows:
    def __init__(self, capacity: int, most_pages: int, device: torch.device, apart: bool = False):
        """`apart` gives the device rows of its own, which a GPU has anyway."""
        width = TABLE + most_pages + most_pages % 2  # even, so that two columns can be read as one int64
        on_gpu = device.type == "cuda"
        self.apart = apart or on_gpu
        self.host = torch.zeros(capacity, width, dtype=torch.int32, pin_memory=on_gpu)
        self.device = torch.zeros_like(self.host, device=device) if self.apart else self.host
        ints = self.host.numpy()
        self.token, self.context, self.table = ints[:, TOKEN], ints[:, CONTEXT], ints[:, TABLE:]
        self.min_left, self.slot = ints[:, MIN_LEFT], ints[:, SLOT]
        self.drafted, self.start = ints[:, DRAFTED], ints[:, START]
        self.ends = np.zeros(capacity, np.int64)  # tokens of the longest that each can become; the device need not know
        self._ints, self._floats = ints, ints.view(np.float32)
        self._keys = ints[:, KEY : KEY + 2].view(np.int64)[:, 0]
        self._ints[:, BANNED:TABLE] = -1

    def put(self, row: int, seq: Sequence) -> None:
        s = seq.request.sampling
        self.ends[row] = len(seq.request.prompt) + s.max_tokens
        self.token[row] = seq.tokens[-1]
        self.context[row] = len(seq.tokens)
        self._keys[row] = request_key(seq.request.seed, seq.request.id)
        self._ints[row, TOP_K] = s.top_k
        self._floats[row, [TEMPERATURE, TOP_P, MIN_P]] = s.temperature, s.top_p, s.min_p
        self.min_left[row] = max(0, s.min_tokens - seq.generated)
        self.slot[row], self.drafted[row], self.start[row] = seq.slot, len(seq.tokens), 0
        banned = list(s.stop_token_ids) if s.min_tokens and s.stop_token_ids else [-1]
        self._ints[row, BANNED:TABLE] = banned + banned[:1] * (MAX_BANNED - len(banned))
        self.put_pages(row, seq)

    def put_pages(self, row: int, seq: Sequence) -> None:
        self.table[row, : len(seq.pages)] = seq.pages

    def drop(self, row: int, last: int) -> None:
        """Forget a row; the last one takes its place."""
        self.ends[row] = self.ends[last]
        self._ints[row] = self._ints[last]
        self._ints[last] = 0
        self._ints[last, BANNED:TABLE] = -1

    def upload(self, count: int) -> None:
        if self.apart:
            self.device[:count].copy_(self.host[:count], non_blocking=True)

    def move_on(self, count: int, drawn: Tensor, logprobs: Tensor, held: Tensor | None = None) -> Tensor | None:
        """Where the device has rows of its own: the tokens [count, n] were drawn, of which the first 1 + held [count]
        count, or the first -> all of it packed."""
        if not self.apart:
            return None
        rows = self.view(0, count)
        return advance_rows(rows.tokens, rows.context, rows.slot, rows.sampling.min_left, drawn, logprobs, held)

    def have_drafted(self, count: int) -> None:
        """On the device: the drafter has taken in all that there is."""
        if self.apart:
            rows = self.view(0, count)
            rows.drafted.copy_((rows.context + 1).where(rows.slot > 0, 0))

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
            banned=part[:, BANNED:TABLE],
        )
        slot, drafted, start = part[:, SLOT], part[:, DRAFTED], part[:, START]
        return RowsView(part[:, TOKEN], part[:, CONTEXT], part[:, TABLE:], slot, drafted, start, sampling)
