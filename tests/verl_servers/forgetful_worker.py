"""A worker whose drafter loses its weights as in sleep at level 2, which needs a GPU."""

from __future__ import annotations

import torch

from paceline.integrations.verl.worker import DrafterBackup, draft_model, own_tensors


class ForgetfulWorker(DrafterBackup):
    @torch.no_grad()
    def paceline_forget_drafter(self) -> int:
        own = own_tensors(draft_model(self.model_runner), self.model_runner.get_model())
        for tensor in own.values():
            tensor.zero_()
        return len(own)
