"""A step of AdamW over one tensor, in place: on a GPU one pass over what it reads and writes.

Moments in bfloat16 change by less than their last bit in most steps: rounded to the nearest, the second one would never
fall again. They are rounded stochastically instead, up or down with probabilities that make them right on average. The
random bits are a hash of the key and the element's index, so a step gives the same result wherever it is made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels
from paceline.kernels.noise import stream

ADAM_CHUNK = 2**26  # elements that the reference steps at once, which bounds its temporary memory


class Rule(NamedTuple):
    """The hyperparameters of a step, the same for all elements of a tensor."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    """The factor of decoupled weight decay, 1 - lr * weight_decay."""
    step: int
    """Counted from 1, for the bias correction."""

    @property
    def corrections(self) -> tuple[float, float]:
        """The bias corrections 1 - beta^step of both moments, which started from zero."""
        return 1 - self.betas[0] ** self.step, 1 - self.betas[1] ** self.step


@dispatch("adam_triton", lambda param, *_: has_kernels(param))
def adam(
    param: Tensor, master: Tensor | None, mean: Tensor, square: Tensor, grad: Tensor, rule: Rule, key: int
) -> None:
    """m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2;  w <- decay w - lr m' / (sqrt(v') + eps), where ' divides by the
    bias correction. w is the master copy, if there is one, which is then rounded to `param`. All are contiguous. `key`
    seeds the stochastic rounding of bfloat16 moments."""
    tensors = (param, param if master is None else master, mean, square, grad)
    for n, (p, w, m, v, g) in enumerate(zip(*(t.view(-1).split(ADAM_CHUNK) for t in tensors), strict=True)):
        _step(p, w, m, v, g, rule, key, n * ADAM_CHUNK)


def _step(
    param: Tensor, weight: Tensor, mean: Tensor, square: Tensor, grad: Tensor, rule: Rule, key: int, first: int
) -> None:
    wide = torch.float64 if param.dtype == torch.float64 else torch.float32
    (b1, b2), (c1, c2) = rule.betas, rule.corrections
    grad = grad.to(wide)
    m = mean.to(wide).lerp_(grad, 1 - b1)  # `mean` itself where it needs no conversion; v and w alike
    v = square.to(wide).mul_(b2).addcmul_(grad, grad, value=1 - b2)
    w = weight.to(wide).mul_(rule.decay).addcdiv_(m, (v / c2).sqrt_().add_(rule.eps), value=-rule.lr / c1)
    for target in (weight, param):
        if target.data_ptr() != w.data_ptr():
            target.copy_(w)
    if mean.dtype == torch.bfloat16 and wide == torch.float32:
        bits = stream(key, first, len(m), m.device)
        m, v = stochastic_round(m, bits & 0xFFFF), stochastic_round(v, bits >> 16)
    if mean.data_ptr() != m.data_ptr():
        mean.copy_(m)
        square.copy_(v)


def stochastic_round(value: Tensor, bits: Tensor) -> Tensor:
    """float32 values rounded to one of their two bfloat16 neighbours, kept as float32; the probability of a neighbour
    falls linearly with its distance. `bits` has 16 random bits for each value."""
    # bfloat16 is the upper half of a float32: adding a random lower half carries over with the right probability.
    return bits.int().add_(value.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32)
