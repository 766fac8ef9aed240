"""Attention of a few new tokens per request over keys and values that live in pages.

Request b has `context[b]` tokens in the cache and T <= 64 new ones, whose keys and values have just been written behind
them. New token t sees the whole context and those new tokens whose bit is set in `tree[b, t]`; for a chain that is
itself and the ones before it. Everything is ready for graphs: no shape depends on a value on the device.

`PageRows` is the plain PyTorch form, built for CPUs: it looks at pages where they lie instead of gathering them, and
joins the partial results of a request's pages by their log-sum-exp, as the split kernel does on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.constants import constant

Array = np.ndarray[Any, Any]
AHEAD = 32  # steps for which the mask of a single-token pass is laid out ahead
MASKED = -1e30  # finite, so that a page of which nothing is visible gets weight zero and not NaN


def chain_tree(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Visibility bits [batch, tokens] of plain causal order."""
    return _chain_bits(tokens, device).expand(batch, tokens)


@constant
def _chain_bits(tokens: int, device: torch.device) -> Tensor:
    bits = [(1 << (t + 1)) - 1 if t < 63 else -1 for t in range(tokens)]
    return torch.tensor(bits, dtype=torch.int64, device=device)


@dataclass
class PageRows:
    """Which page belongs to which request, worked out once per pass and used by every layer.

    A row is one page as seen by one request. When pages are used densely and by one request each, rows are the pool's
    pages themselves and nothing is copied; otherwise (shared prompts, a thinly used pool) pages are gathered. Page
    sizes of a few hundred tokens suit a CPU: most requests then have a single row and nothing needs joining.
    """

    new: int  # new tokens per request
    owner: Tensor  # [rows] request that looks at the row
    ordered: bool  # row i belongs to request i, and there are no others
    bias: Tensor  # [rows, 1, queries, extent] added to the scores
    rows_of: Tensor  # [batch * most] the rows of each request
    most: int  # rows of the request that has most
    extent: int  # part of each page that anyone can see
    straight: bool  # each request has `most` rows, and they lie in order
    absent: Tensor | None  # [batch * most, 1, 1] added to the log-sum-exp of rows that a request does not have
    first: int  # first page of the rows, where rows are pages
    gather: Tensor | None  # [rows] page of each row; None where rows are pages
    last_place: Tensor | None  # [batch] index in the flattened bias of the newest token of each request
    steps_left: int  # how often `advance` can be called
    parts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # what of each layer's pools is visible

    @classmethod
    def build(
        cls, table: Tensor, context: Tensor, tree: Tensor, page_size: int, group: int, dtype: torch.dtype
    ) -> PageRows:
        """Worked out in NumPy, whose small operations cost half of torch's; this happens in every step."""
        batch, new = tree.shape
        lengths = context.numpy()
        longest = min(int(lengths.max()) + new, table.shape[1] * page_size)
        most = -(-longest // page_size)
        extent = min(page_size, -(-(longest + AHEAD) // AHEAD) * AHEAD)
        absent = None
        if most == 1:
            owner = np.arange(batch)
            ordinal, row_page, rows_of = np.zeros_like(owner), table[:, 0].numpy(), owner
        else:
            counts = np.minimum((lengths + (new + page_size - 1)) // page_size, most)
            present = np.arange(most) < counts[:, None]
            owner, ordinal = present.nonzero()
            row_page = table[:, :most].numpy()[owner, ordinal]
            rows_of = np.where(present, (counts.cumsum() - counts)[:, None] + np.arange(most), 0).reshape(-1)
            absent = torch.from_numpy(np.where(present, 0.0, MASKED).reshape(-1, 1, 1)).to(dtype)
        low, high = int(row_page.min()), int(row_page.max()) + 1
        place = row_page - low
        gather = None
        if high - low <= 1.5 * len(owner) and np.bincount(place).max() == 1:
            rows_of = place[rows_of]
            whole = np.zeros((2, high - low), dtype=np.int64)
            whole[:, place] = owner, ordinal
            owner, ordinal = whole
        else:
            gather = torch.from_numpy(row_page.astype(np.int64))
        # The age of a place is below 0 in the context, and else tells which new token it holds.
        age = (ordinal * page_size - lengths[owner])[:, None] + np.arange(extent)
        visible = age < 0 if new > 1 else age <= 0
        shown = np.where(visible, np.float32(0), np.float32(MASKED))[:, None]
        if new > 1:
            shown = _add_tree(shown, tree.numpy(), lengths, rows_of.reshape(batch, most), page_size, group)
        bias = torch.from_numpy(shown)[:, None].to(dtype)
        ordered = most == 1 and len(owner) == batch and bool((owner == np.arange(batch)).all())
        last_place, steps_left = None, 0
        if new == 1:
            offsets = lengths % page_size
            last_row = rows_of.reshape(batch, most)[np.arange(batch), lengths // page_size]
            last_place = torch.from_numpy(last_row * extent + offsets)
            steps_left = extent - 1 - int(offsets.max())
        owners, places = torch.from_numpy(owner), torch.from_numpy(rows_of)
        straight = len(owner) == batch * most and bool((rows_of == np.arange(batch * most)).all())
        return cls(
            new, owners, ordered, bias, places, most, extent, straight, absent, low, gather, last_place, steps_left
        )

    def advance(self) -> None:
        """Move on by one token per request, in place, while all stay within their pages."""
        assert self.steps_left > 0 and self.last_place is not None
        self.steps_left -= 1
        self.bias.view(-1)[self.last_place.add_(1)] = 0.0

    def attend(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: int = 0) -> Tensor:
        """q [batch * new, heads, d], pools [pages, kv_heads, page_size, d] of a layer -> [batch * new, heads * d]."""
        rows, heads, d = q.shape
        new, kv_heads = self.new, k_pool.shape[1]
        batch = rows // new
        group = heads // kv_heads
        # All queries of one kv head lie together: [batch, kv_heads, group * new, d].
        if new == 1:
            q = q.reshape(batch, kv_heads, group, d)
        else:
            q = q.view(batch, new, kv_heads, group, d).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * new, d)
        if self.gather is None:
            if layer not in self.parts:
                where = slice(self.first, self.first + len(self.owner))
                self.parts[layer] = k_pool[where, :, : self.extent], v_pool[where, :, : self.extent]
            k, v = self.parts[layer]
        else:
            k, v = (pool[:, :, : self.extent].index_select(0, self.gather) for pool in (k_pool, v_pool))
        if not self.ordered:
            q = q.index_select(0, self.owner)
        if self.absent is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
            if not self.ordered:
                out = out.index_select(0, self.rows_of)
        else:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=self.bias)
            shape = (batch, self.most, kv_heads, group * new)
            if not self.straight:
                lse = lse.index_select(0, self.rows_of) + self.absent
                out = out.index_select(0, self.rows_of)
            share = lse.view(shape).softmax(1).to(out.dtype)
            out = (out.view(*shape, d) * share[..., None]).sum(1)
        if new == 1:
            return out.view(batch, heads * d)
        return out.view(batch, kv_heads, group, new, d).permute(0, 3, 1, 2, 4).reshape(rows, heads * d)


def _add_tree(shown: Array, tree: Array, lengths: Array, rows_of: Array, page_size: int, group: int) -> Array:
    """From what all queries see, [rows, 1, extent], to what each of them sees, [rows, group * new, extent]: they differ
    only in the few places behind the context."""
    batch, new = tree.shape
    shown = np.broadcast_to(shown, (len(shown), group * new, shown.shape[2])).copy()
    ahead = np.arange(new)
    place = lengths[:, None] + ahead  # [batch, new]
    room = rows_of.shape[1] * page_size
    if place[:, -1].max() >= room:
        # A place that the table has no room for is written as the first one: nobody may see it, and nothing is lost.
        ahead = np.where(place < room, ahead, 0)
        place = lengths[:, None] + ahead
    row = rows_of[np.arange(batch)[:, None], place // page_size]
    seen = (tree[:, :, None] >> np.broadcast_to(ahead, place.shape)[:, None]) & 1  # [batch, new, new]
    values = np.where(seen, np.float32(0), np.float32(MASKED))
    # Queries of a kv head are ordered by head, then by token.
    by_head = shown.reshape(len(shown), group, new, -1)
    query = np.arange(new)[:, None]
    for head in range(group):
        by_head[row[:, None], head, query, (place % page_size)[:, None]] = values
    return shown
