"""Attention of a few new tokens per request over keys and values that live in pages.

Request b has `context[b]` tokens in the cache and T <= 64 new ones, whose keys and values have just been written after
them. New token t sees the whole context and those new tokens i for which bit i of tree[b, t] is set; for a chain, these
are itself and the ones before it. No shape depends on a value on the device, so passes can be captured as graphs.

`PageRows` is the reference in plain PyTorch, built for CPUs: it reads pages where they are instead of gathering them,
and joins the partial results of a request's pages by their log-sum-exp, as the split kernel does on a GPU.
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
MASK_STEPS = 32  # tokens by which the mask of a single-token pass is longer than needed, so that `advance` can be used
MASKED = -1e30  # score of a position that is not visible; finite, so that a page without visible positions gives no NaN


def chain_tree(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Visibility bits int64 [batch, tokens] of causal order: bits 0 ... t are set for token t."""
    return _chain_bits(tokens, device).expand(batch, tokens)


@constant
def _chain_bits(tokens: int, device: torch.device) -> Tensor:
    bits = [(1 << (t + 1)) - 1 if t < 63 else -1 for t in range(tokens)]
    return torch.tensor(bits, dtype=torch.int64, device=device)


@dataclass
class PageRows:
    """Which page belongs to which request, and the mask; computed once per pass and used by every layer.

    A row is one page as read by one request. When the pages in use are nearly consecutive and belong to one request
    each, rows are the pool's pages themselves and nothing is copied; otherwise (shared prompts, a sparsely used pool)
    pages are gathered. Page sizes of a few hundred tokens suit a CPU: most requests then have a single row and nothing
    needs joining.
    """

    new: int  # new tokens per request
    owner: Tensor  # [rows] request that reads the row
    ordered: bool  # row i belongs to request i, and there are no others
    bias: Tensor  # [rows, 1, queries, extent] added to the scores: 0 or MASKED
    rows_of: Tensor  # [batch * max_rows] the rows of each request
    max_rows: int  # most rows of a request
    extent: int  # leading positions of each page that any query can see
    contiguous: bool  # each request has `max_rows` rows, in order
    absent: Tensor | None  # [batch * max_rows, 1, 1] added to the log-sum-exp: MASKED for rows that a request lacks
    first_page: int  # page of row 0, where rows are pages
    gather: Tensor | None  # [rows] page of each row; None where rows are pages
    last_index: Tensor | None  # [batch] index in the flattened bias of each request's newest token
    steps_left: int  # how often `advance` can be called
    views: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # of each layer's pools: the rows, to `extent`

    @classmethod
    def build(
        cls, table: Tensor, context: Tensor, tree: Tensor, page_size: int, group: int, dtype: torch.dtype
    ) -> PageRows:
        """table int [batch, max_pages], context int [batch], tree int64 [batch, new]; `group` is the number of query
        heads per kv head, `dtype` that of the scores. In NumPy, whose small operations cost half of torch's: this
        happens in every step."""
        batch, new = tree.shape
        lengths = context.numpy()
        longest = min(int(lengths.max()) + new, table.shape[1] * page_size)
        max_rows = -(-longest // page_size)
        extent = min(page_size, -(-(longest + MASK_STEPS) // MASK_STEPS) * MASK_STEPS)
        absent = None
        if max_rows == 1:
            owner = np.arange(batch)
            ordinal = np.zeros_like(owner)
            row_page = table[:, 0].numpy()
            rows_of = owner
        else:
            counts = np.minimum((lengths + (new + page_size - 1)) // page_size, max_rows)
            present = np.arange(max_rows) < counts[:, None]
            owner, ordinal = present.nonzero()
            row_page = table[:, :max_rows].numpy()[owner, ordinal]
            rows_of = np.where(present, (counts.cumsum() - counts)[:, None] + np.arange(max_rows), 0).reshape(-1)
            absent = torch.from_numpy(np.where(present, 0.0, MASKED).reshape(-1, 1, 1)).to(dtype)
        low, high = int(row_page.min()), int(row_page.max()) + 1
        offset = row_page - low
        gather = None
        if high - low <= 1.5 * len(owner) and np.bincount(offset).max() == 1:
            rows_of = offset[rows_of]
            whole = np.zeros((2, high - low), dtype=np.int64)
            whole[:, offset] = owner, ordinal
            owner, ordinal = whole
        else:
            gather = torch.from_numpy(row_page.astype(np.int64))
        # Positions relative to the context's length: negative within the context, else the index of a new token.
        relative = (ordinal * page_size - lengths[owner])[:, None] + np.arange(extent)
        visible = relative < 0 if new > 1 else relative <= 0
        shown = np.where(visible, np.float32(0), np.float32(MASKED))[:, None]
        if new > 1:
            shown = _add_tree(shown, tree.numpy(), lengths, rows_of.reshape(batch, max_rows), page_size, group)
        bias = torch.from_numpy(shown)[:, None].to(dtype)
        ordered = max_rows == 1 and len(owner) == batch and bool((owner == np.arange(batch)).all())
        last_index = None
        steps_left = 0
        if new == 1:
            offsets = lengths % page_size
            last_row = rows_of.reshape(batch, max_rows)[np.arange(batch), lengths // page_size]
            last_index = torch.from_numpy(last_row * extent + offsets)
            steps_left = extent - 1 - int(offsets.max())
        owners = torch.from_numpy(owner)
        row_index = torch.from_numpy(rows_of)
        contiguous = len(owner) == batch * max_rows and bool((rows_of == np.arange(batch * max_rows)).all())
        return cls(
            new,
            owners,
            ordered,
            bias,
            row_index,
            max_rows,
            extent,
            contiguous,
            absent,
            low,
            gather,
            last_index,
            steps_left,
        )

    def advance(self) -> None:
        """Make one more position per request visible, in place, while all stay within their pages."""
        assert self.steps_left > 0 and self.last_index is not None
        self.steps_left -= 1
        self.bias.view(-1)[self.last_index.add_(1)] = 0.0

    def attend(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer: int = 0) -> Tensor:
        """q [batch * new, heads, d], pools [pages, kv_heads, page_size, d] of a layer -> [batch * new, heads * d]."""
        rows, heads, d = q.shape
        new = self.new
        kv_heads = k_pool.shape[1]
        batch = rows // new
        group = heads // kv_heads
        # All queries of one kv head are contiguous: [batch, kv_heads, group * new, d].
        if new == 1:
            q = q.reshape(batch, kv_heads, group, d)
        else:
            q = q.view(batch, new, kv_heads, group, d).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * new, d)
        if self.gather is None:
            if layer not in self.views:
                pages = slice(self.first_page, self.first_page + len(self.owner))
                self.views[layer] = k_pool[pages, :, : self.extent], v_pool[pages, :, : self.extent]
            k, v = self.views[layer]
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
            shape = (batch, self.max_rows, kv_heads, group * new)
            if not self.contiguous:
                lse = lse.index_select(0, self.rows_of) + self.absent
                out = out.index_select(0, self.rows_of)
            share = lse.view(shape).softmax(1).to(out.dtype)
            out = (out.view(*shape, d) * share[..., None]).sum(1)
        if new == 1:
            return out.view(batch, heads * d)
        return out.view(batch, kv_heads, group, new, d).permute(0, 3, 1, 2, 4).reshape(rows, heads * d)


def _add_tree(shown: Array, tree: Array, lengths: Array, rows_of: Array, page_size: int, group: int) -> Array:
    """From the mask of the context, which all queries share, [rows, 1, extent], to that of each query,
    [rows, group * new, extent]: they differ only at the positions of the new tokens."""
    batch, new = tree.shape
    shown = np.broadcast_to(shown, (len(shown), group * new, shown.shape[2])).copy()
    ahead = np.arange(new)
    position = lengths[:, None] + ahead  # [batch, new]
    capacity = rows_of.shape[1] * page_size
    if position[:, -1].max() >= capacity:
        # A position beyond the capacity is in no row: the first token's entry is written again instead, unchanged.
        ahead = np.where(position < capacity, ahead, 0)
        position = lengths[:, None] + ahead
    row = rows_of[np.arange(batch)[:, None], position // page_size]
    seen = (tree[:, :, None] >> np.broadcast_to(ahead, position.shape)[:, None]) & 1  # [batch, new, new]
    values = np.where(seen, np.float32(0), np.float32(MASKED))
    # Queries of a kv head are ordered by head, then by token.
    by_head = shown.reshape(len(shown), group, new, -1)
    query = np.arange(new)[:, None]
    for head in range(group):
        by_head[row[:, None], head, query, (position % page_size)[:, None]] = values
    return shown
