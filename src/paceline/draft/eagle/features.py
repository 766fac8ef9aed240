"""The policy's features of the latest tokens of each running request, kept for the EAGLE drafter.

Every pass of the policy leaves its tapped hidden states and the tokens that it sampled here, in a ring of the drafter's
window per request. A drafter that was off for a while finds what it missed, so that switching it on never runs the
policy again.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from paceline.kernels.feature_ring import write_features


class FeatureRing:
    def __init__(self, slots: int, window: int, width: int, dtype: torch.dtype, device: torch.device):
        self.window = window
        # Slot 0 is scratch: rows that pad a graph and what must not be kept are written there.
        self.features = torch.zeros(slots + 1, window, width, dtype=dtype, device=device)
        self.tokens = torch.zeros(slots + 1, window, dtype=torch.int32, device=device)
        self.put = functools.partial(write_features, self.features, self.tokens)
        """Keep what a pass leaves; as `kernels.feature_ring.write_features`, with this ring and its tokens."""

    def take(self, slot: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens [B, n] at `positions` [B, n] and the features [B, n, width] of those before them."""
        rows = slot.long()[:, None]
        return self.tokens[rows, positions % self.window], self.features[rows, (positions - 1) % self.window]
