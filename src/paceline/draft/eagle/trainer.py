"""The training of a drafter, step by step: gradients, AdamW on float32 masters, and writing back what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.draft.eagle.gradients import make_gradients
from paceline.draft.eagle.loss import DraftLoss, PackedSequences
from paceline.draft.eagle.model import EagleModel, copy_of

GROW_AT = 0.6  # how often the last draft token in a row agrees with the policy before one more is trained
GROWTH_HORIZON = 16  # training steps over which that is averaged


@dataclass
class TrainSettings:
    lr: float = 2e-3
    runs: int = 5
    """Draft tokens in a row that are trained."""
    first_runs: int | None = None
    """How many in the first half of the training, if not as many: what the first one has to learn is most of it, and
    steps with fewer draft tokens are quicker."""
    grow: bool = False
    """Whether to begin with one draft token in a row, and to train more as soon as the last one is mostly right:
    steps with fewer are quicker, and what comes behind a wrong draft token is never used."""
    loss: DraftLoss = "soft"
    warmup: int = 20


class EagleTrainer:
    """AdamW on a copy of the drafter, in the policy's precision with float32 masters; `publish` writes it back."""

    def __init__(self, drafter: EagleModel, settings: TrainSettings):
        self.drafter = drafter
        self.settings = settings
        self.copy = copy_of(drafter).requires_grad_(True)
        self.masters = [p.detach().float() for p in self.copy.parameters()]  # the weights themselves, if float32
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=self.copy.fc.is_cuda
        )
        self.steps = 0
        several = {settings.runs, settings.first_runs or settings.runs}
        if settings.grow:
            several |= set(range(1, settings.runs))
        self.runs = min(several) if settings.grow else settings.runs
        """Draft tokens in a row that are trained now, where their number grows."""
        self._agreement = 0.0  # of the last of them, over the last steps
        self._gradients = {runs: make_gradients(self.copy, runs, settings.loss) for runs in several}
        self._computed: torch.cuda.Event | None = None

    def step(self, sequences: PackedSequences, progress: float = 0.0) -> tuple[float, list[float]]:
        """One update on these sequences; `progress` from 0 to 1 lowers the rate. What is not finite changes nothing."""
        self.begin(sequences, progress)
        return self.end()

    def begin(self, sequences: PackedSequences, progress: float = 0.0) -> None:
        """The first half of a step: have its gradients computed. A GPU goes on with that while the host does other
        things."""
        s = self.settings
        self._rate = s.lr * min(1.0, (self.steps + 1) / s.warmup) * (1.0 - 0.9 * progress)
        runs = s.first_runs if s.first_runs and progress < 0.5 else self.runs
        self._found = self._gradients[runs](sequences)
        self._numbers = torch.empty_like(self._found.numbers, device="cpu", pin_memory=self._found.numbers.is_cuda)
        self._numbers.copy_(self._found.numbers, non_blocking=True)
        self._computed = torch.cuda.current_stream().record_event() if self._found.numbers.is_cuda else None

    @property
    def computed(self) -> bool:
        """Whether `end` has nothing to wait for."""
        return self._computed is None or self._computed.query()

    def end(self) -> tuple[float, list[float]]:
        """The second half: update the weights -> the loss, and how often each draft token in a row agreed."""
        if self._computed is not None:
            self._computed.synchronize()
        value, norm, *agree = self._numbers.tolist()
        if math.isfinite(value) and math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate
            self._update(self._found.of)
            self.steps += 1
            if self.settings.grow:
                self._grow(agree[-1])
        return value, agree

    def _grow(self, agreement: float) -> None:
        """The last draft token in a row that is trained agreed so often."""
        self._agreement += (agreement - self._agreement) / GROWTH_HORIZON
        if self._agreement > GROW_AT and self.runs < self.settings.runs:
            self.runs += 1
            self._agreement = 0.0

    @torch.no_grad()
    def _update(self, gradients: list[Tensor]) -> None:
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()
        self._follow()

    def _follow(self) -> None:
        """The masters have changed: so does the copy."""
        torch._foreach_copy_(list(self.copy.parameters()), self.masters)

    @torch.no_grad()
    def replace(self, weights: Sequence[Tensor]) -> None:
        """Go on from these weights; the optimizer keeps what it knows."""
        for master, weight in zip(self.masters, weights, strict=True):
            master.copy_(weight)
        self._follow()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that training goes on with: tensors by name, and plain values."""
        tensors: dict[str, Tensor] = {}
        for (name, _), master in zip(self.copy.named_parameters(), self.masters, strict=True):
            moments = self.optimizer.state.get(master, {})
            tensors |= {f"{part}.{name}": tensor for part, tensor in {"master": master, **moments}.items()}
        return tensors, {"steps": self.steps, "runs": self.runs}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        masters = [tensors[f"master.{name}"] for name, _ in self.copy.named_parameters()]
        for (name, _), own, kept in zip(self.copy.named_parameters(), self.masters, masters, strict=True):
            if own.shape != kept.shape:
                raise ValueError(f"tensor {name} has shape {list(kept.shape)}, but the drafter has {list(own.shape)}")
        self.replace(masters)
        self.optimizer.state.clear()
        for (name, _), master in zip(self.copy.named_parameters(), self.masters, strict=True):
            if f"step.{name}" in tensors:
                moments = {p: tensors[f"{p}.{name}"].to(master.device, copy=True) for p in ("exp_avg", "exp_avg_sq")}
                if any(moment.shape != master.shape for moment in moments.values()):
                    raise ValueError(f"the moments of {name} do not have the shape {list(master.shape)}")
                # AdamW counts on the host, unless its steps are fused.
                device = master.device if master.is_cuda else "cpu"
                self.optimizer.state[master] = {"step": tensors[f"step.{name}"].to(device, copy=True), **moments}
        self.steps = values["steps"]
        self.runs = min(self.settings.runs, values.get("runs", self.settings.runs))

    @torch.no_grad()
    def publish(self) -> None:
        for mine, trained in zip(self.drafter.parameters(), self.copy.parameters(), strict=True):
            mine.copy_(trained)
