"""AdamW that writes weights in place and lets the precision of its state be chosen.

Weights are shared with the rollout engine, whose graphs hold their addresses, so they are never replaced. bfloat16
weights would swallow most updates at the learning rates of RL; a float32 master copy keeps them. Where several workers
share the work, each one's optimizer holds the state of some parameters only, and steps only those.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from paceline.kernels.adam import Rule, adam
from paceline.kernels.noise import request_key


class AdamW:
    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_dtype: torch.dtype = torch.float32,
        master_weights: bool = True,
        names: Iterable[str] | None = None,
    ):
        """Holds the state of all `parameters`, or of those called `names`."""
        self.parameters = dict(parameters)
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.state_dtype = state_dtype
        self.master_weights = master_weights
        self.steps = 0
        self.mean: dict[str, Tensor] = {}
        self.square: dict[str, Tensor] = {}
        self.master: dict[str, Tensor] = {}
        for name in self.parameters if names is None else names:
            self.hold(name)

    def hold(self, name: str) -> None:
        """Begin to hold a parameter's state, as if nothing had been learned yet."""
        param = self.parameters[name]
        assert param.is_contiguous(), "it is stepped where it lies"
        dtype = torch.float64 if param.dtype == torch.float64 else self.state_dtype
        self.mean[name] = torch.zeros_like(param, dtype=dtype)
        self.square[name] = torch.zeros_like(param, dtype=dtype)
        if self.master_weights and param.dtype.itemsize < 4:
            self.master[name] = param.detach().float()

    def drop(self, name: str) -> None:
        for part in (self.mean, self.square, self.master):
            part.pop(name, None)

    def tensors(self, name: str) -> list[Tensor]:
        """The state of a parameter that is held."""
        return [part[name] for part in (self.mean, self.square, self.master) if name in part]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every parameter that has a gradient."""
        self.steps += 1
        for name in self.mean:
            param = self.parameters[name]
            if param.grad is None:
                continue
            decay = self.weight_decay if param.dim() > 1 else 0.0  # norms and biases are not pulled towards zero
            rule = Rule(lr, self.betas, self.eps, 1 - lr * decay, self.steps)
            # Rounding depends on the step and the parameter alone.
            key = request_key(zlib.crc32(name.encode()), self.steps)
            state = self.master.get(name), self.mean[name], self.square[name]
            adam(param.data, *state, param.grad.contiguous(), rule, key)

    def zero_grad(self) -> None:
        for param in self.parameters.values():
            param.grad = None

    def state(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """What a checkpoint needs, by name: of all parameters that are held, or of some."""
        parts = {"mean": self.mean, "square": self.square, "master": self.master}
        chosen = self.mean.keys() if names is None else names
        tensors = {f"{part}.{k}": t for part, group in parts.items() for k, t in group.items() if k in chosen}
        return tensors | {"steps": torch.tensor(self.steps)}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Take what is held from the state of all."""
        self.steps = int(state["steps"])
        for part, group in (("mean", self.mean), ("square", self.square), ("master", self.master)):
            for name, tensor in group.items():
                tensor.copy_(state[f"{part}.{name}"])
