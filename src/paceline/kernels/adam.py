"""A step of AdamW over one tensor, in place: on a GPU one pass over what it reads and writes.

Moments in bfloat16 change by less than their last bit in most steps: rounded to the nearest, the second one would never
fall again. They are rounded up or down by chance instead, so that they are right on average. The chance is a hash of
the key and the place, so it is the same wherever and however often a step is made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels
from paceline.kernels.noise import stream

PIECE = 2**26  # numbers that the plain form steps at once: what bounds the memory that it takes for itself


class Rule(NamedTuple):
    """What is the same for all numbers of a tensor."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    """What is left of a weight, before it is moved."""
    step: int
    """From 1 on."""

    @property
    def corrections(self) -> tuple[float, float]:
        """How far the moments are from the zeros that they started from."""
        return 1 - self.betas[0] ** self.step, 1 - self.betas[1] ** self.step


@dispatch("adam_triton", lambda param, *_: has_kernels(param))
def adam(
    param: Tensor, master: Tensor | None, mean: Tensor, square: Tensor, grad: Tensor, rule: Rule, key: int
) -> None:
    """m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2;  w <- decay w - lr m' / (sqrt(v') + eps), where ' is the
    correction. w is the master copy, where there is one, and the parameter follows it. All are contiguous."""
    whole = (param, param if master is None else master, mean, square, grad)
    for n, (p, w, m, v, g) in enumerate(zip(*(t.view(-1).split(PIECE) for t in whole), strict=True)):
        _step(p, w, m, v, g, rule, key, n * PIECE)


def _step(
    param: Tensor, weight: Tensor, mean: Tensor, square: Tensor, grad: Tensor, rule: Rule, key: int, first: int
) -> None:
    wide = torch.float64 if param.dtype == torch.float64 else torch.float32
    (b1, b2), (c1, c2) = rule.betas, rule.corrections
    grad = grad.to(wide)
    m = mean.to(wide).lerp_(grad, 1 - b1)  # what lies there itself, where no conversion is needed
    v = square.to(wide).mul_(b2).addcmul_(grad, grad, value=1 - b2)
    w = weight.to(wide).mul_(rule.decay).addcdiv_(m, (v / c2).sqrt_().add_(rule.eps), value=-rule.lr / c1)
    for kept in (weight, param):
        if kept.data_ptr() != w.data_ptr():
            kept.copy_(w)
    if mean.dtype == torch.bfloat16 and wide == torch.float32:
        chance = stream(key, first, len(m), m.device)
        m, v = stochastic_round(m, chance & 0xFFFF), stochastic_round(v, chance >> 16)
    if mean.data_ptr() != m.data_ptr():
        mean.copy_(m)
        square.copy_(v)


def stochastic_round(value: Tensor, chance: Tensor) -> Tensor:
    """float32 numbers that bfloat16 can hold: each of the two neighbours the likelier the nearer it is. `chance` has 16
    random bits for each."""
    # bfloat16 is the upper half of a float32: adding a random lower half carries over as often as it should.
    return chance.int().add_(value.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32)
