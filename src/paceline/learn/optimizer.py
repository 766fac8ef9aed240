"""AdamW that writes weights in place and lets the precision of its state be chosen.

Weights are shared with the rollout engine, whose graphs hold their addresses, so they are never replaced. bfloat16
weights would swallow most updates at the learning rates of RL; a float32 master copy keeps them. Where several workers
share the work, each one's optimizer holds the state of some parameters only, and steps only those.

Moments in bfloat16 change by less than their last bit in most steps: rounded to the nearest, the second one would never
fall again. They are rounded up or down by chance instead, so that they are right on average. The chance is a function
of the step and the parameter, so it is the same wherever and however often a step is made.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

PIECE = 2**26  # numbers that are stepped at once: what bounds the memory that a step takes for itself


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
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.state_dtype, self.master_weights = state_dtype, master_weights
        self.steps = 0
        self.mean: dict[str, Tensor] = {}
        self.square: dict[str, Tensor] = {}
        self.master: dict[str, Tensor] = {}
        for name in self.parameters if names is None else names:
            self.hold(name)

    def hold(self, name: str) -> None:
        """Begin to hold a parameter's state, as if nothing had been learned yet."""
        param = self.parameters[name]
        assert param.is_contiguous(), "it is stepped piece by piece where it lies"
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
        """m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2;  w <- (1 - lr wd) w - lr m' / (sqrt(v') + eps), where ' is
        the correction for the zeros that m and v started from."""
        self.steps += 1
        (b1, b2), t = self.betas, self.steps
        for name in self.mean:
            param = self.parameters[name]
            if param.grad is None:
                continue
            if self.weight_decay and param.dim() > 1:  # norms and biases are not pulled towards zero
                self.master.get(name, param).mul_(1 - lr * self.weight_decay)
            whole = (param, self.master.get(name, param), self.mean[name], self.square[name], param.grad)
            chance = torch.Generator(param.device)
            chance.manual_seed(zlib.crc32(f"{name} {t}".encode()))
            for w, master, mean, square, grad in zip(*(x.reshape(-1).split(PIECE) for x in whole), strict=True):
                self._step(w, master, mean, square, grad, lr, b1, b2, t, chance)

    def _step(
        self,
        param: Tensor,
        weight: Tensor,
        mean: Tensor,
        square: Tensor,
        grad: Tensor,
        lr: float,
        b1: float,
        b2: float,
        t: int,
        chance: torch.Generator,
    ) -> None:
        """A piece of a parameter; `weight` is its master copy, or the parameter itself."""
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        grad = grad.to(wide)
        first = mean.to(wide).lerp_(grad, 1 - b1)
        second = square.to(wide).mul_(b2).addcmul_(grad, grad, value=1 - b2)
        _keep(mean, first, chance)
        denominator = (second / (1 - b2**t)).sqrt_().add_(self.eps)
        _keep(square, second, chance)
        if weight.dtype == wide:
            weight.addcdiv_(first, denominator, value=-lr / (1 - b1**t))
        else:
            weight.copy_(weight.to(wide).addcdiv_(first, denominator, value=-lr / (1 - b1**t)))
        if weight.data_ptr() != param.data_ptr():
            param.copy_(weight)

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


def _keep(state: Tensor, value: Tensor, chance: torch.Generator) -> None:
    if state.data_ptr() == value.data_ptr():  # the same tensor where no conversion was needed
        return
    if state.dtype == torch.bfloat16 and value.dtype == torch.float32:
        value = by_chance(value, chance)
    state.copy_(value)


def by_chance(value: Tensor, chance: torch.Generator) -> Tensor:
    """float32 numbers that bfloat16 can hold: each of the two neighbours the likelier the nearer it is."""
    # bfloat16 is the upper half of a float32: adding a random lower half carries over as often as it should.
    noise = torch.randint(0, 2**16, value.shape, dtype=torch.int32, device=value.device, generator=chance)
    return noise.add_(value.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32)
