"""What runs in vLLM's workers beside what verl runs there: exchanging the drafter, and a copy of it on the host.

vLLM has one place for such methods, `worker_extension_cls`, and verl fills it: so this derives from verl's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from paceline.integrations.vllm.worker import DrafterWorker


class DrafterBackup(DrafterWorker, vLLMColocateWorkerExtension):
    """Every name begins with `paceline`: vLLM refuses an extension that has a name of its worker."""

    model_runner: Any
    _paceline_kept: dict[str, Tensor] | None = None

    @torch.no_grad()
    def paceline_keep_drafter(self) -> int:
        """Copy the drafter to the host -> its bytes; 0 where there is none with weights of its own."""
        own = own_tensors(draft_model(self.model_runner), self.model_runner.get_model())
        self._paceline_kept = {name: tensor.to("cpu", copy=True) for name, tensor in own.items()}
        return sum(tensor.nbytes for tensor in own.values())

    @torch.no_grad()
    def paceline_restore_drafter(self) -> int:
        """Copy it back, in place: captured graphs stay valid -> the number of tensors."""
        own = own_tensors(draft_model(self.model_runner), self.model_runner.get_model())
        for name, kept in (self._paceline_kept or {}).items():
            own[name].copy_(kept)
        return len(self._paceline_kept or {})


def draft_model(model_runner: Any) -> nn.Module | None:
    """Of either of vLLM's model runners."""
    proposer = getattr(model_runner, "drafter", None) or getattr(model_runner, "speculator", None)
    model: Any = getattr(proposer, "model", None)
    model = model.unwrap() if hasattr(model, "unwrap") else model  # around it, captured graphs
    return model if isinstance(model, nn.Module) else None


def own_tensors(drafter: nn.Module | None, policy: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a drafter that are not the policy's (embeddings, often the head), which the trainer
    sends."""
    if drafter is None:
        return {}
    shared = {tensor.data_ptr() for tensor in _tensors(policy).values()}
    return {name: tensor for name, tensor in _tensors(drafter).items() if tensor.data_ptr() not in shared}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
