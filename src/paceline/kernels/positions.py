"""Where a pass reads and writes, worked out on the device: small sums over few numbers, each as one kernel on a GPU.

In plain PyTorch each of these is ten operations, and a step of a small model would spend its time between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.constants import constant
from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels


@dispatch("positions_triton", lambda table, *_: has_kernels(table))
def kv_slots(table: Tensor, context: Tensor, new: int, page_size: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Of `new` tokens behind the context of each request: row numbers int64 [B * new * kv_heads] of a layer's pool, and
    whether each has a place of its own, bool [B, new]; those that the table int [B, most] has no room for get scratch.
    """
    place = context.long()[:, None] + up_to(new, context.device)  # [B, T]
    pages = table.gather(1, (place // page_size).clamp_(max=table.shape[1] - 1))
    if new > 1:
        pages = pages.where(place < table.shape[1] * page_size, 0)
    first = (pages.long()[..., None] * kv_heads + up_to(kv_heads, context.device)) * page_size
    return (first + (place % page_size)[..., None]).view(-1), pages > 0


@dispatch("positions_triton", lambda token, *_: has_kernels(token))
def tree_nodes(token: Tensor, context: Tensor, guesses: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """Of trees with the roots `token`, int32 [B], and guesses int32 [B, T - 1]: every member's token, the root first,
    int32 [B * T], and its position int32 [B * T], as deep in the tree [B, T] behind the context [B] as it is. A guess
    below zero, which is none, is looked at as token 0."""
    tokens = torch.cat((token[:, None], guesses.clamp(min=0)), 1)
    return tokens.flatten(), (context[:, None] + depth).int().flatten()


@constant
def up_to(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device)


@dispatch("positions_triton", lambda _, inv_freq, *__: has_kernels(inv_freq))
def rotations(positions: Tensor, inv_freq: Tensor, signs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [N, 1, d] of positions [N], from the frequencies [d] and the factors [2, d] of cosine and sine."""
    angle = positions.to(inv_freq.dtype)[:, None] * inv_freq
    return (angle.cos() * signs[0]).to(dtype)[:, None], (angle.sin() * signs[1]).to(dtype)[:, None]


@dispatch("positions_triton", lambda slot, *_: has_kernels(slot))
def window_table(
    slot: Tensor, drafted: Tensor, start: Tensor, window: int, ring: int, stride: int, room: int
) -> tuple[Tensor, Tensor]:
    """The pages that a drafter's round looks at: of each request the known entries of its ring in order, then the first
    `room` places behind the ring -> table int32 [B, window + room], number of known entries int32 [B].
    `drafted` entries are known, of which those from `start` on can be seen; slot, drafted and start: int [B]."""
    drafted = drafted.long()[:, None]
    known = (drafted - start.long().clamp(min=0)[:, None]).clamp(0, window)
    column = up_to(window + room, slot.device)
    # Behind the known entries comes the room, whatever their number.
    in_room = ring + (column - known).clamp(max=room - 1)
    page = slot.long()[:, None] * stride + torch.where(column < known, (drafted - known + column) % ring, in_room)
    return page.int(), known[:, 0].int()
