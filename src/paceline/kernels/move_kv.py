"""After a draft tree was verified: the keys and values of accepted nodes move to the slots of plain decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels


@dispatch("move_kv_triton", lambda k, *_: has_kernels(k))
def move_accepted_kv(k: Tensor, v: Tensor, slots: Tensor, path: Tensor, num_accepted: Tensor) -> None:
    """k and v [layers, slots * kv_heads, d], changed in place; slots int64 [B, T, kv_heads], the row of each tree node;
    path int64 [B, 1 + depth], the nodes of the accepted path by depth, the root first; num_accepted int [B], how many
    of them are accepted after the root. Node path[b, l] moves to the slot of node l, for 1 <= l <= num_accepted[b].
    Parents come before their children, so path[b, l] >= l and a slot is only overwritten by a later node."""
    depth = torch.arange(1, path.shape[1], device=path.device)
    source = slots.gather(1, path[:, 1:, None].expand(-1, -1, slots.shape[-1]))
    # Rejected nodes are copied onto themselves.
    target = torch.where((depth <= num_accepted[:, None])[..., None], slots[:, 1 : path.shape[1]], source)
    for rows in (k, v):
        rows.index_copy_(1, target.flatten(), rows.index_select(1, source.flatten()))
