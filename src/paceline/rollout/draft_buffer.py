"""Where draft tokens wait for the pass that verifies them."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.draft.base import DeviceDraft, Draft
from paceline.draft.strategy import MAX_TREE_NODES, Strategy


class DraftBuffer:
    """Draft tokens and their parents on the device, with a staging buffer for those that are made on the host."""

    def __init__(self, rows: int, device: torch.device):
        self._drafts = torch.zeros(2, rows, MAX_TREE_NODES, dtype=torch.int32, device=device)
        self._log_probs = torch.zeros(rows, MAX_TREE_NODES, device=device)
        self._staging = torch.zeros_like(self._drafts, device="cpu", pin_memory=self._drafts.is_cuda)

    def put(self, draft: DeviceDraft) -> None:
        """Take a draft that was made on the device."""
        batch, nodes = draft.tokens.shape
        self._drafts[0, :batch, :nodes] = draft.tokens
        self._drafts[1, :batch, :nodes] = draft.parents
        if draft.log_probs is not None:
            self._log_probs[:batch, :nodes] = draft.log_probs

    def upload(self, draft: Draft, batch: int) -> None:
        """Take a draft that was made on the host, for a pass of `batch` rows."""
        count, nodes = draft.tokens.shape
        # The last round has been read, so nobody reads the staging buffer any more.
        staged = self._staging.view(-1)[: 2 * batch * nodes].view(2, batch, nodes)
        staged[0, :count] = torch.from_numpy(draft.tokens)
        staged[1, :count] = torch.from_numpy(draft.parents)
        staged[:, count:] = 0  # rows that pad a graph are trees too: what an earlier draft left may not be one
        self._drafts[:, :batch, :nodes].copy_(staged, non_blocking=True)

    def get(self, batch: int, strategy: Strategy) -> tuple[Tensor, Tensor]:
        """Tokens and parents, int32 [batch, nodes]."""
        return self._drafts[0, :batch, : strategy.nodes], self._drafts[1, :batch, : strategy.nodes]

    def log_probs(self, batch: int, strategy: Strategy) -> Tensor:
        """That the drafter gave its draft tokens, float32 [batch, nodes]."""
        return self._log_probs[:batch, : strategy.nodes]
