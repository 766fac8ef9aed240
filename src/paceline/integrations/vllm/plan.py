"""The memory that following a policy takes, planned before anything is loaded, and what the parts need to begin."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.config.training import SpotConfig
from paceline.draft.eagle.files import load_drafter
from paceline.errors import RunError
from paceline.files.reading import inside, read_object
from paceline.integrations.vllm.features import load_policy
from paceline.model.checkpoint import find_model
from paceline.model.decoder import as_dtype
from paceline.model.weights import inventory
from paceline.setup.device import choose_device
from paceline.spot.learning import READ_TOKENS_GPU
from paceline.spot.memory import drafter_training_bytes

if TYPE_CHECKING:
    from paceline.integrations.vllm.online import OnlineDrafter

GB = 1e9
LAYER_WIDTHS = 8  # hidden widths of activations of a layer beside its MLP, that are there at once while it is read


@dataclass(frozen=True)
class FollowPlan:
    """What is followed, by what, and where."""

    policy: str
    drafter: Path
    """The version to begin with."""
    started_with: Path
    """The one that the engine was started with, which stays on disk."""
    folder: Path
    """Of all versions."""
    dtype: str
    device: str = "auto"
    spot: dict[str, Any] = field(default_factory=dict)
    """Settings of the training, as in `spot`."""
    seed: int = 0
    warm: bool = False
    version: int = 0
    threads: int = 0
    """Of the CPU; 0 leaves it to torch."""

    def make(self) -> OnlineDrafter:
        """Load the policy and its drafter; a RunError if they do not fit."""
        from paceline.integrations.vllm.online import OnlineDrafter  # whoever has a side-car needs none of it

        if self.threads:
            torch.set_num_threads(self.threads)
        device = choose_device(self.device)
        config = SpotConfig.model_validate(self.spot)
        plan_memory(self, device, config).check(device)
        policy = load_policy(self.policy, self.dtype, device)
        drafter = load_drafter(self.drafter, policy.decoder)
        return OnlineDrafter(
            policy, drafter, self.folder, config, self.seed, self.warm, self.version, self.started_with
        )

    def describe_memory(self) -> str:
        device = choose_device(self.device)
        return plan_memory(self, device, SpotConfig.model_validate(self.spot)).describe(str(device))


@dataclass(frozen=True)
class MemoryNeeds:
    policy: int
    """Bytes of a copy of the policy's weights."""
    training: int
    """Bytes of the drafter, its gradients and moments, and one step."""
    buffer: int
    """Bytes of answers and their features, on the host."""

    @property
    def device(self) -> int:
        return self.policy + self.training

    def describe(self, device: str) -> str:
        return (
            f"following the policy takes {self.device / GB:.2f} GB on {device} ({self.policy / GB:.2f} for a copy of "
            f"its weights, {self.training / GB:.2f} for training its drafter) and up to {self.buffer / GB:.2f} GB of "
            "the host's memory for answers"
        )

    def check(self, device: torch.device) -> None:
        if device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(device)
        if self.device > free:
            share = max(0.0, 1 - self.device / total)
            raise RunError(
                f"{self.describe(str(device))}, but only {free / GB:.2f} GB of it are free: start vLLM with "
                f"gpu_memory_utilization of at most {share:.2f}, or train on another device"
            )


def plan_memory(plan: FollowPlan, device: torch.device, config: SpotConfig) -> MemoryNeeds:
    folder = find_model(plan.policy)
    dtype = as_dtype(plan.dtype, device)
    hf = read_object(inside(folder, "config.json"))
    own = read_object(inside(plan.drafter, "config.json"))
    weights = sum(stored.count for stored in inventory(folder).values())
    parameters = sum(stored.count for stored in inventory(plan.drafter).values())
    hidden = int(own["hidden_size"])
    cuda = device.type == "cuda"
    reading = READ_TOKENS_GPU * (2 * int(hf.get("intermediate_size", 4 * hidden)) + LAYER_WIDTHS * hidden)
    training = drafter_training_bytes(parameters, int(own["draft_vocab_size"]), hidden, 0, dtype, cuda)
    return MemoryNeeds(weights * dtype.itemsize, training + reading * dtype.itemsize, int(config.buffer_mb * 2**20))
