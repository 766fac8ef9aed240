"""What runs in the workers of a vLLM engine that rolls out for a trainer: `worker_extension_cls` adds these methods."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.integrations.vllm import internals
from paceline.integrations.vllm.rollout_messages import PolicyWeights
from paceline.integrations.vllm.weights import read_shared
from paceline.integrations.vllm.worker import DrafterWorker

LEARNER_GPU = 0  # of those that the engine's process sees: they are given to it in that order


class RolloutWorker(DrafterWorker):
    """A worker whose policy and drafter can be exchanged."""

    @torch.no_grad()
    def paceline_take_policy(self, weights: PolicyWeights) -> int:
        """Load the policy's weights into the memory of those before -> how many tensors there were."""
        count = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal count
            for name, tensor in read_shared(weights, LEARNER_GPU):
                count += 1
                yield name, tensor

        internals.load_policy_weights(self, counted())
        if weights.handles is not None:
            torch.cuda.synchronize()
        return count
