"""The GPU form of `kernels.adam`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.adam import Rule
from paceline.kernels.fused_triton import _GOLDEN, _mix

ADAM_BLOCK = 1024  # elements that a program steps


def adam(
    param: Tensor,
    master: Tensor | None,
    mean: Tensor,
    square: Tensor,
    grad: Tensor,
    rule: Rule,
    key: int,
    stochastic: bool | None = None,
) -> None:
    """As `kernels.adam.adam`. `stochastic`: whether moments are rounded stochastically to bfloat16, by default if that
    is their type."""
    (b1, b2), (c1, c2) = rule.betas, rule.corrections
    count = param.numel()
    _adam[(triton.cdiv(count, ADAM_BLOCK),)](
        param, param if master is None else master, mean, square, grad, count, key,
        1 - b1, b2, 1 - b2, rule.decay, rule.lr / c1, 1 / c2, rule.eps,
        MASTER=master is not None, STOCHASTIC=mean.dtype == torch.bfloat16 if stochastic is None else stochastic,
        BLOCK=ADAM_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "key"])
def _adam(
    param, master, mean, square, grad, count, key, new1, b2, new2, decay, rate, correction, eps,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    g = tl.load(grad + i, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(mean + i, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(square + i, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(master + i, mask=mask, other=0.0).to(tl.float32)
    m += (g - m) * new1
    v = v * b2 + g * g * new2
    w = w * decay - rate * m / (tl.sqrt(v * correction) + eps)
    if MASTER:
        tl.store(master + i, w, mask=mask)
    tl.store(param + i, w.to(param.dtype.element_ty), mask=mask)
    if STOCHASTIC:
        bits = _mix(key + (i + 1) * _GOLDEN) >> 32
        m = _stochastic_round(m, bits & 0xFFFF)
        v = _stochastic_round(v, (bits >> 16) & 0xFFFF)
    tl.store(mean + i, m.to(mean.dtype.element_ty), mask=mask)
    tl.store(square + i, v.to(square.dtype.element_ty), mask=mask)


@triton.jit
def _stochastic_round(value, bits):
    return ((value.to(tl.int32, bitcast=True) + bits.to(tl.int32)) & -65536).to(tl.float32, bitcast=True)
