"""What the policy thought of the latest tokens of each running request, kept for a neural drafter.

Every pass of the policy leaves its tapped hidden states and the tokens that it drew here, in a ring of the drafter's
window per request. A drafter that was off for a while finds what it missed, so that switching it on never runs the
policy again.
"""

from __future__ import annotations

import torch
from torch import Tensor


class FeatureRing:
    def __init__(self, slots: int, window: int, width: int, dtype: torch.dtype, device: torch.device):
        self.window = window
        # Slot 0 is scratch: rows that pad a graph and what must not be kept are written there.
        self.features = torch.zeros(slots + 1, window, width, dtype=dtype, device=device)
        self.tokens = torch.zeros(slots + 1, window, dtype=torch.int32, device=device)
        self._flat = self.features.view(-1, width)

    def put(self, slot: Tensor, place: Tensor, features: Tensor, drawn: Tensor, kept: Tensor | None = None) -> None:
        """Keep the features [B, n, width] of the tokens at places from `place` [B] on, and the tokens [B, n] drawn for
        the places behind each; where `kept` [B, n] is given, only those."""
        ahead = torch.arange(drawn.shape[1], device=place.device)
        places = place.long()[:, None] + ahead
        rows = slot.long()[:, None].expand_as(places)
        if kept is not None:
            rows = rows.where(kept, 0)
        first = rows * self.window
        self._flat.index_copy_(0, (first + places % self.window).view(-1), features.reshape(-1, features.shape[-1]))
        self.tokens.view(-1).index_copy_(0, (first + (places + 1) % self.window).view(-1), drawn.int().reshape(-1))

    def take(self, slot: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens [B, n] at `places` [B, n] and the features [B, n, width] of those before them."""
        rows = slot.long()[:, None]
        return self.tokens[rows, places % self.window], self.features[rows, (places - 1) % self.window]
