"""After a tree was checked: keys and values of the guesses that hold go where plain decoding would have put them."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels


@dispatch("move_kv_triton", lambda k, *_: has_kernels(k))
def move_accepted_kv(k: Tensor, v: Tensor, slots: Tensor, way: Tensor, held: Tensor) -> None:
    """k and v [layers, places * kv_heads, d]; slots int64 [B, T, kv_heads], where each member of a tree lies; way int64
    [B, 1 + depth], the members on the way down; held int [B], how many of them hold behind the first. Member way[l]
    moves to where member l lies. No member is on its way before its own place: way[l] >= l."""
    level = torch.arange(1, way.shape[1], device=way.device)
    source = slots.gather(1, way[:, 1:, None].expand(-1, -1, slots.shape[-1]))
    # What does not hold stays where it is.
    target = torch.where((level <= held[:, None])[..., None], slots[:, 1 : way.shape[1]], source)
    for rows in (k, v):
        rows.index_copy_(1, target.flatten(), rows.index_select(1, source.flatten()))
