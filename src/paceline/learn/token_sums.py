"""Sums over the tokens of an update, from which its metrics are made."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

SUMMED = ("loss", "entropy", "clipped", "update_kl", "mismatch", "mismatch_k3", "kl")


@dataclass
class TokenSums:
    """Sums over the tokens of an update; kept on the device so that nothing waits for them."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + value.detach().double().sum()

    def mean(self, name: str, count: int) -> float:
        return float(self.values[name]) / count

    def to_tensor(self, device: torch.device) -> Tensor:
        """All of them in a fixed order [len(SUMMED)], so that those of several learners can be added."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([self.values.get(name, zero) for name in SUMMED])

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TokenSums:
        return cls(dict(zip(SUMMED, tensor.unbind(), strict=True)))


def mean_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates of a step."""
    return {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}
