"""Attention of the engine's passes over the KV cache: filling it with prompts, and decoding over it."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.fused import has_kernels
from paceline.kernels.hopper.epilogue import KVRows
from paceline.kernels.paged_attention import PageRows, chain_tree
from paceline.kernels.positions import kv_slots
from paceline.model.attention import PackedAttention
from paceline.rollout.pages import PagePool


class PrefillAttention(PackedAttention):
    """Whole sequences from their first token on: they see themselves, and leave their keys and values in the pages."""

    def __init__(self, pool: PagePool, lengths: list[int], slots: Tensor):
        super().__init__(lengths, slots.device)
        self.pool = pool
        self.slots = slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.write(layer, self.slots, k, v)
        return super().__call__(layer, q, k, v)


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
