"""The EAGLE drafter's cache: the keys and values of its latest entries, in a ring per request, and attention over it.

A round copies the rings of the batch side by side, followed by slots for the entries that are missing and for draft
tokens; a draft token sees the ring, the entries behind it, and its own ancestors. Only entries of accepted tokens go
back into the rings. Shapes never depend on values, so a round can be part of a captured graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.model.attention import PackedAttention
from paceline.model.config import DecoderConfig

MASKED = -1e30


class WindowCache:
    def __init__(
        self, config: DecoderConfig, slots: int, window: int, capacity: int, dtype: torch.dtype, device: torch.device
    ):
        """Slot 0 is scratch: rows that pad a graph and entries that must not be kept are written there. Each ring is
        followed by `capacity` slots that stay zero, so that a copy of it can take the entries of a round."""
        self.window = window
        self.capacity = capacity
        shape = (slots + 1, config.kv_heads, window + capacity, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def put(self, slot: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Entries [B, n, kv_heads, d] of the positions [B, n]; those of slot 0 are dropped. slot: [B, n]."""
        self.k[slot, :, positions % self.window] = k
        self.v[slot, :, positions % self.window] = v

    def fill(self, slots: Tensor, tail: tuple[Tensor, Tensor], length: int) -> None:
        """The last entries [n, kv_heads, d] of a sequence of this length, n at most the window, for each slot [B]."""
        n = len(tail[0])
        positions = torch.arange(length - n, length, device=self.k.device) % self.window
        self.k[slots[:, None], :, positions] = tail[0]
        self.v[slots[:, None], :, positions] = tail[1]

    def round(self, slot: Tensor, drafted: Tensor, start: Tensor, capacity: int) -> RoundAttention:
        return RoundAttention(self, slot, drafted, start, capacity)


class TailAttention(PackedAttention):
    """Whole sequences at once; remembers the last keys and values of each, as `WindowCache.fill` takes them."""

    def __init__(self, lengths: list[int], device: torch.device, window: int):
        super().__init__(lengths, device)
        self.window = window
        self.tails: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        both = zip(k.split(self.lengths), v.split(self.lengths), strict=True)
        self.tails = [(a[-self.window :], b[-self.window :]) for a, b in both]
        return super().__call__(layer, q, k, v)


class RoundAttention:
    """Attention of the passes of one round. Each call belongs to the tokens announced before it."""

    def __init__(self, cache: WindowCache, slot: Tensor, drafted: Tensor, start: Tensor, capacity: int):
        """`drafted` entries of each request are known, of which those from `start` on can be seen; all int [B]."""
        assert capacity <= cache.capacity, "no round is larger than the largest strategy's"
        self.batch = len(slot)
        window = cache.window
        ring = slot.long()
        self.keys = cache.k[ring]
        self.values = cache.v[ring]
        # Column j of a ring holds the latest known position that leaves the remainder j.
        newest = drafted.long()[:, None] - 1
        columns = torch.arange(window, device=slot.device)
        positions = newest - (newest - columns) % window
        known = positions >= start.long().clamp(min=0)[:, None]
        self.bias = torch.full((self.batch, 1, 1, window + capacity), MASKED, dtype=cache.k.dtype, device=slot.device)
        self.bias[:, 0, 0, :window].masked_fill_(known, 0)
        self.used = window
        self._mask = self.bias
        self._base = window
        self.new: tuple[Tensor, Tensor] | None = None

    def entries(self, count: int, present: Tensor) -> None:
        """Next come `count` entries in order; later passes see those that are `present` [B, count]."""
        first = self.used
        self.used += count
        self._seen_by(torch.tril(torch.ones(count, count, dtype=torch.bool, device=present.device))[None], first)
        self.bias[:, 0, 0, first : self.used].masked_fill_(present, 0)
        self._base = self.used

    def draft_token(self) -> None:
        """Next comes one draft token per request, which sees all before it."""
        if self.used == self._base:
            self.bias[..., self._base :] = 0  # for all of them
        self.used += 1
        self._mask = self.bias[..., : self.used]

    def draft_level(self, ancestry: Tensor) -> None:
        """Next come n draft tokens per request; `ancestry` [B, n, draft tokens so far and these] tells whom each
        sees."""
        self.used += ancestry.shape[1]
        self._seen_by(ancestry, self._base)

    def _seen_by(self, seen: Tensor, first: int) -> None:
        """All see what the bias shows before column `first`; behind it, each what `seen` [B, n, columns] says."""
        own = torch.zeros_like(seen, dtype=self.bias.dtype).masked_fill_(~seen, MASKED)[:, None]
        shared = self.bias[..., :first].expand(-1, -1, seen.shape[1], -1)
        self._mask = torch.cat((shared, own.expand(self.batch, -1, -1, -1)), -1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, d = q.shape
        batch = self.batch
        n = rows // batch
        kv_heads = k.shape[1]
        group = heads // kv_heads
        keys = self.keys[:, :, : self.used]
        values = self.values[:, :, : self.used]
        self.new = k, v
        if n == 1:  # the same as below, with fewer operations
            keys[:, :, -1] = k
            values[:, :, -1] = v
            q = q.view(batch, kv_heads, group, d)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask).reshape(batch, heads * d)
        keys[:, :, -n:] = k.view(batch, n, kv_heads, d).transpose(1, 2)
        values[:, :, -n:] = v.view(batch, n, kv_heads, d).transpose(1, 2)
        # All queries of one kv head lie together: [batch, kv_heads, group * n, d].
        q = q.view(batch, n, kv_heads, group, d).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * n, d)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask.repeat(1, 1, group, 1))
        return out.reshape(batch, kv_heads, group, n, d).permute(0, 3, 1, 2, 4).reshape(rows, heads * d)
