"""Keeping a pass's features and drawn tokens in a ring per request."""

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
    place: Tensor,
    features: Tensor,
    drawn: Tensor,
    way: Tensor | None = None,
    held: Tensor | None = None,
) -> None:
    """ring [slots, window, width] and tokens int32 [slots, window], whose slot 0 is scratch. What is kept: the features
    [B, T, width] of the tokens at the places from `place` [B] on, and the tokens int [B, n] drawn for the places behind
    each. Where `way` [B, n] is given, those of the members on the way; where `held` [B] is, only the first 1 + held."""
    window, width = ring.shape[1:]
    ahead = torch.arange(drawn.shape[1], device=place.device)
    places = place.long()[:, None] + ahead
    rows = slot.long()[:, None].expand_as(places)
    if way is not None:
        features = features.gather(1, way[..., None].expand(-1, -1, width))
    if held is not None:
        rows = rows.where(ahead <= held[:, None], 0)
    first = rows * window
    ring.view(-1, width).index_copy_(0, (first + places % window).view(-1), features.reshape(-1, width))
    tokens.view(-1).index_copy_(0, (first + (places + 1) % window).view(-1), drawn.int().reshape(-1))
