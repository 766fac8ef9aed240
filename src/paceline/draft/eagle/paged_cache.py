"""The GPU form of the EAGLE drafter's cache: rings are read where they lie, through the paged attention kernel.

Every entry is a page of one token. A request's table lists the known entries of its ring in order, then the slots of
its round, where it puts the entries that are missing and draft tokens. What `eagle.cache` does by copying rings
side by side is done here by writing a table, and the two agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.hopper.epilogue import KVRows
from paceline.kernels.paged_attention import chain_tree
from paceline.kernels.positions import up_to, window_table
from paceline.model.config import DecoderConfig


class PagedWindowCache:
    def __init__(
        self, config: DecoderConfig, slots: int, window: int, capacity: int, dtype: torch.dtype, device: torch.device
    ):
        """As `WindowCache`: slot 0 is scratch, and each ring is followed by `capacity` slots for a round."""
        self.window = window
        self.capacity = capacity
        self.ring = window + capacity  # so that the entries that a round adds overwrite none that it still reads
        self.stride = self.ring + capacity
        shape = ((slots + 1) * self.stride, config.kv_heads, 1, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def put(self, slot: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Entries [B, n, kv_heads, d] of the positions [B, n]; those of slot 0 are dropped. slot: [B, n]."""
        from paceline.kernels.fused_triton import write

        page = slot * self.stride + positions % self.ring
        heads, d = k.shape[-2:]
        rows = (page[..., None] * heads + up_to(heads, page.device)).flatten()
        write(k.flatten(0, 1), v.flatten(0, 1), self.k.view(-1, d), self.v.view(-1, d), rows)

    def fill(self, slots: Tensor, tail: tuple[Tensor, Tensor], length: int) -> None:
        """The last entries [n, kv_heads, d] of a sequence of this length, n at most the window, for each slot [B]."""
        n = len(tail[0])
        positions = torch.arange(length - n, length, device=self.k.device) % self.ring
        page = slots[:, None] * self.stride + positions
        self.k[page, :, 0] = tail[0]
        self.v[page, :, 0] = tail[1]

    def round(self, slot: Tensor, drafted: Tensor, start: Tensor, capacity: int) -> PagedRound:
        return PagedRound(self, slot, drafted, start, capacity)


class PagedRound:
    """Attention of the passes of one round. Each call belongs to the tokens announced before it."""

    def __init__(self, cache: PagedWindowCache, slot: Tensor, drafted: Tensor, start: Tensor, capacity: int):
        """`drafted` entries of each request are known, of which those from `start` on can be seen; all int [B]."""
        assert capacity <= cache.capacity, "no round is larger than the largest strategy's"
        self._cache = cache
        self.batch = len(slot)
        self.table, self.context = window_table(slot, drafted, start, cache.window, cache.ring, cache.stride, capacity)
        first = slot.long() * cache.stride + cache.ring  # [B] first page of each one's round
        self._rows = first[:, None] * cache.k.shape[1] + up_to(cache.k.shape[1], slot.device)  # [B, kv_heads]
        self._capacity = capacity
        self._present: Tensor | None = None  # [B] slots of the round with present entries
        self._ahead: tuple[Tensor, Tensor] | None = None
        self._drafted = 0
        self._bits = self._visible = self.context
        self._span = 0
        self._at = self._rows
        self.new: tuple[Tensor, Tensor] | None = None

    def entries(self, count: int, present: Tensor) -> None:
        """Next come `count` entries in order; later passes see those that are `present` [B, count], the first ones."""
        self._visible = self.context
        self._span = count
        self._bits = chain_tree(self.batch, count, present.device)
        self._at = self._round_rows(up_to(count, present.device)[None])
        self._present = present.sum(1)
        self.context = (self.context + self._present).int()

    def draft_token(self) -> None:
        """Next comes one draft token per request, which sees all before it."""
        if self._ahead is None:  # for all levels at once
            level = up_to(self._capacity, self.context.device)[:, None]
            offset = level if self._present is None else level + self._present  # [capacity, B]
            at = self._rows + offset[..., None] * self._rows.shape[-1]  # [capacity, B, kv_heads]
            self._ahead = (self.context + level).int(), at.flatten(1)
        seen, at = self._ahead
        self._visible = seen[self._drafted]
        self._span = 1
        self._bits = chain_tree(self.batch, 1, self.context.device)
        self._at = at[self._drafted]
        self._drafted += 1

    def draft_level(self, ancestry: Tensor) -> None:
        """Next come n draft tokens per request; `ancestry` [B, n, draft tokens so far and these] tells whom each
        sees."""
        n, columns = ancestry.shape[1:]
        self._visible = self.context
        self._span = columns
        self._bits = (ancestry * (1 << up_to(columns, ancestry.device))).sum(-1)
        ahead = (self._drafted + up_to(n, ancestry.device))[None]
        self._at = self._round_rows(ahead if self._present is None else self._present[:, None] + ahead)
        self._drafted += n

    def _round_rows(self, offset: Tensor) -> Tensor:
        """Rows of the pools for the slots [B or 1, n] of the round."""
        return (self._rows[:, None] + offset[..., None] * self._rows.shape[-1]).flatten()

    def cache(self, layer: int) -> KVRows:
        pools = self._cache
        return KVRows(pools.k.view(-1, pools.k.shape[-1]), pools.v.view(-1, pools.v.shape[-1]), self._at)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from paceline.kernels.fused_triton import write

        write(k, v, *self.cache(layer))
        return self.attend(layer, q, k, v)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from paceline.kernels.paged_attention_triton import paged_attention

        self.new = k, v
        q = q.unflatten(0, (self.batch, -1))
        out = paged_attention(q, self._cache.k, self._cache.v, self.table, self._visible, self._bits, self._span)
        return out.flatten(2).flatten(0, 1)
