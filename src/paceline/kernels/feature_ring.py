"""Writing a pass's features and sampled tokens into each request's ring, from which a drafter reads."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels


@dispatch("feature_ring_triton", lambda ring, *_: has_kernels(ring))
def write_features(
    ring: Tensor,
    tokens: Tensor,
    slot: Tensor,
    position: Tensor,
    features: Tensor,
    sampled: Tensor,
    path: Tensor | None = None,
    num_accepted: Tensor | None = None,
) -> None:
    """ring [slots, window, width] and tokens int32 [slots, window] are written in place; an entry of position p has
    index p % window, and slot 0 is scratch. Request b with slot[b] gets, for t < n, the features [B, T, width] of node
    t at position[b] + t, and the token sampled[b, t], int [B, n], at the position after it. With `path` [B, n] node
    path[b, t] takes the place of node t; with `num_accepted` [B] only t <= num_accepted[b] are kept."""
    window, width = ring.shape[1:]
    ahead = torch.arange(sampled.shape[1], device=position.device)
    positions = position.long()[:, None] + ahead
    rows = slot.long()[:, None].expand_as(positions)
    if path is not None:
        features = features.gather(1, path[..., None].expand(-1, -1, width))
    if num_accepted is not None:
        rows = rows.where(ahead <= num_accepted[:, None], 0)
    first = rows * window
    ring.view(-1, width).index_copy_(0, (first + positions % window).view(-1), features.reshape(-1, width))
    tokens.view(-1).index_copy_(0, (first + (positions + 1) % window).view(-1), sampled.int().reshape(-1))
