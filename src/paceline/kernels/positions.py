"""Where a pass reads and writes: KV slots, token positions, rotations and a drafter's page table, from the request rows
on the device.

In plain PyTorch each of these is ten operations on few numbers, and a step of a small model would spend its time in
their launches; on a GPU each is one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.constants import constant
from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels


@dispatch("positions_triton", lambda table, *_: has_kernels(table))
def kv_slots(table: Tensor, context: Tensor, new: int, page_size: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """The KV slots of `new` tokens per request at positions context[b] + t, by the page table int [B, max_pages] and
    context int [B] -> rows int64 [B * new * kv_heads] of a layer's pool [pages * kv_heads * page_size, d], and usable
    bool [B, new]: whether a position has a page. One that has none, or is beyond the table's capacity, gets a row of
    page 0, which is scratch."""
    position = context.long()[:, None] + up_to(new, context.device)  # [B, T]
    pages = table.gather(1, (position // page_size).clamp_(max=table.shape[1] - 1))
    if new > 1:
        pages = pages.where(position < table.shape[1] * page_size, 0)
    first = (pages.long()[..., None] * kv_heads + up_to(kv_heads, context.device)) * page_size
    return (first + (position % page_size)[..., None]).view(-1), pages > 0


@dispatch("positions_triton", lambda token, *_: has_kernels(token))
def tree_nodes(token: Tensor, context: Tensor, draft_tokens: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens and positions of draft trees, both int32 [B * T] with the root first: token int32 [B] and draft_tokens
    int32 [B, T - 1], at context [B] + depth [B, T]. A negative draft token means none, and is scored as token 0."""
    tokens = torch.cat((token[:, None], draft_tokens.clamp(min=0)), 1)
    return tokens.flatten(), (context[:, None] + depth).int().flatten()


@constant
def up_to(n: int, device: torch.device) -> Tensor:
    """0, 1, ..., n - 1, int64 [n]; made once per device, so that captured graphs can read it."""
    return torch.arange(n, device=device)


@dispatch("positions_triton", lambda _, inv_freq, *__: has_kernels(inv_freq))
def rotations(positions: Tensor, inv_freq: Tensor, signs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rotary embedding's cos and sin [N, 1, d] at positions [N]: cos(p * inv_freq) * signs[0] and
    sin(p * inv_freq) * signs[1], with inv_freq [d] and signs [2, d]."""
    angle = positions.to(inv_freq.dtype)[:, None] * inv_freq
    return (angle.cos() * signs[0]).to(dtype)[:, None], (angle.sin() * signs[1]).to(dtype)[:, None]


@dispatch("positions_triton", lambda slot, *_: has_kernels(slot))
def window_table(
    slot: Tensor, drafted: Tensor, start: Tensor, window: int, ring: int, stride: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """The page table of a drafter's attention, with pages of one entry: a request's slot has `stride` pages, of which
    the first `ring` hold its past entries (entry e in page e % ring) and the next `capacity` the new ones of a round.
    slot, drafted and start are int [B]: entries [start, drafted) exist, and the last `window` of them are visible ->
    table int32 [B, window + capacity], first the visible entries in order, then the new pages; and the number of
    visible entries int32 [B]."""
    drafted = drafted.long()[:, None]
    visible = (drafted - start.long().clamp(min=0)[:, None]).clamp(0, window)
    column = up_to(window + capacity, slot.device)
    new_page = ring + (column - visible).clamp(max=capacity - 1)
    page = slot.long()[:, None] * stride + torch.where(column < visible, (drafted - visible + column) % ring, new_page)
    return page.int(), visible[:, 0].int()
