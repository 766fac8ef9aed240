"""Attention of the engine's passes over the KV cache: filling it with prompts, and decoding over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.draft.confidence import SharedRows
from paceline.kernels.fused import has_kernels
from paceline.kernels.hopper.epilogue import KVRows
from paceline.kernels.paged_attention import PageRows, chain_tree
from paceline.kernels.positions import kv_slots
from paceline.model.attention import PackedAttention
from paceline.rollout.pages import PagePool

if TYPE_CHECKING:
    from paceline.rollout.scheduler import Fill


class PrefillAttention(PackedAttention):
    """Whole sequences from their first token on: they see themselves, and leave their keys and values in the pages."""

    def __init__(self, pool: PagePool, lengths: list[int], slots: Tensor):
        super().__init__(lengths, slots.device)
        self.pool = pool
        self.slots = slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.write(layer, self.slots, k, v)
        return super().__call__(layer, q, k, v)


class ContinuedAttention(PrefillAttention):
    """Some of them go on behind what is in their pages, and see that too."""

    def __init__(self, pool: PagePool, fills: list[Fill], slots: Tensor):
        super().__init__(pool, [len(f.tokens) for f in fills], slots)
        device = slots.device
        self.seen: list[Tensor | None] = []
        """Of each, the rows of the pool that it sees, [(start + n) * kv_heads]; None if it has begun."""
        self.masks: list[Tensor | None] = []
        for fill, n in zip(fills, self.lengths, strict=True):
            end = fill.start + n
            pages, offsets = _places(fill.pages, torch.arange(end, device=device), pool.page_size)
            self.seen.append(pool.slots(pages, offsets) if fill.start else None)
            mask = torch.ones(n, end, dtype=torch.bool, device=device).tril(fill.start)
            self.masks.append(mask if fill.start else None)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.write(layer, self.slots, k, v)
        k_rows, v_rows = self.pool.rows(layer)
        heads, kv_heads, d = q.shape[1], *k.shape[1:]
        out = []
        parts = zip(*(x.split(self.lengths) for x in (q, k, v)), self.seen, self.masks, strict=True)
        for own_q, own_k, own_v, seen, mask in parts:
            keys = own_k if seen is None else k_rows[seen].view(-1, kv_heads, d)
            values = own_v if seen is None else v_rows[seen].view(-1, kv_heads, d)
            keys, values = (x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1)[None] for x in (keys, values))
            queries = own_q.transpose(0, 1)[None]
            mixed = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=mask is None)
            out.append(mixed[0].transpose(0, 1).flatten(1))
        return torch.cat(out)


def prefill_attention(pool: PagePool, fills: list[Fill], positions: Tensor) -> PrefillAttention:
    """`positions` [N] of the tokens of all of them, end to end."""
    size = pool.page_size
    pages = [f.pages[i // size] for f in fills for i in range(f.start, f.start + len(f.tokens))]
    slots = pool.slots(torch.tensor(pages, device=positions.device), positions % size)
    if any(fill.start for fill in fills):
        return ContinuedAttention(pool, fills, slots)
    return PrefillAttention(pool, [len(f.tokens) for f in fills], slots)


def _places(pages: list[int], positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The page of each position of a sequence, and where in it it lies."""
    return torch.tensor(pages, device=positions.device)[positions // size], positions % size


class DecodeAttention:
    """T new tokens per request over its pages; `tree` says which new tokens see which (default: causal).

    Those for which a request has no page go to the scratch page: `usable` tells which ones have one."""

    def __init__(self, pool: PagePool, table: Tensor, context: Tensor, heads: int, tree: Tensor | None = None):
        self.pool = pool
        self.table = table
        self.context = context
        self.tree = chain_tree(len(context), 1, context.device) if tree is None else tree
        self.new = self.tree.shape[1]
        kv_heads = pool.k.shape[2]
        # Where the new tokens are written, and which of them have a slot of their own, bool [B, T].
        self.slots, self.usable = kv_slots(table, context, self.new, pool.page_size, kv_heads)
        self.rows: PageRows | None = None
        if not has_kernels(pool.k):
            group = heads // kv_heads
            self.rows = PageRows.build(table, context, self.tree, pool.page_size, group, pool.k.dtype)

    def advance(self) -> bool:
        """Move on to the next token of the same requests, if that is cheaper than building anew."""
        if self.rows is None or self.rows.steps_left == 0:
            return False
        self.slots += 1  # the next slot within each page
        self.rows.advance()
        return True

    def cache(self, layer: int) -> KVRows:
        return KVRows(*self.pool.rows(layer), self.slots)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.write(layer, self.slots, k, v)
        return self.attend(layer, q, k, v)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_pool, v_pool = self.pool.k_layers[layer], self.pool.v_layers[layer]
        if self.rows is not None:
            return self.rows.attend(q, k_pool, v_pool, layer)
        from paceline.kernels.paged_attention_triton import paged_attention

        q = q.unflatten(0, (-1, self.new))
        return paged_attention(q, k_pool, v_pool, self.table, self.context, self.tree).flatten(2).flatten(0, 1)


class SharedAttention(DecodeAttention):
    """Of the chosen rows of a pass, where requests share what is verified: their queries are spread over [B, T]. Those
    that were not chosen leave no keys and values."""

    def __init__(self, pool: PagePool, table: Tensor, context: Tensor, heads: int, tree: Tensor, shared: SharedRows):
        super().__init__(pool, table, context, heads, tree)
        self.shared = shared
        self.slots = self.slots.view(-1, pool.k.shape[2])[shared.flat].flatten()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = q.new_zeros(self.tree.numel(), *q.shape[1:])
        whole[self.shared.flat] = q
        return super().attend(layer, whole, k, v)[self.shared.flat]
