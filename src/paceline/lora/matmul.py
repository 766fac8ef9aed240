"""A matmul by merged weights whose gradient goes to the adapters.

With y = x W^T and W = W0 + s B A the chain rule gives, where dy is the gradient of y and u = x A^T:

    dB = s dy^T u        dA = s (dy B)^T x        dx = dy W

So the forward pass is one matmul, as without adapters, and the gradient of W itself, as expensive as that matmul, is
never made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class AdaptedRows(NamedTuple):
    """An adapter, and the rows of the fused matrix that it belongs to."""

    start: int
    end: int
    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[end - start, rank]"""


class AdaptedMatmul:
    """A layer calls it in place of the matmul by one of its fused matrices wherever gradients are asked for."""

    def __init__(self, scale: float, parts: Sequence[AdaptedRows]):
        self.scale = scale
        self.parts = list(parts)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, inputs], weight [inputs, outputs], merged -> [N, outputs]"""
        rows = [(part.start, part.end) for part in self.parts]
        adapters = [tensor for part in self.parts for tensor in (part.a, part.b)]
        out: Tensor = _AdaptedMatmul.apply(x, weight, self.scale, rows, *adapters)
        return out


class _AdaptedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: float, rows: list[tuple[int, int]], *adapters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, *adapters)
        ctx.scale = scale
        ctx.rows = rows
        return torch.mm(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *adapters = ctx.saved_tensors
        a, b = adapters[0::2], adapters[1::2]
        rank = len(a[0])
        # The parts of a fused matrix read the same x: it is read once for all of them.
        inner = x @ torch.cat(list(a)).to(x.dtype).t()  # [N, parts * rank]
        parts = [grad[:, start:end] for start, end in ctx.rows]
        outer = torch.cat([part @ one.to(grad.dtype) for part, one in zip(parts, b, strict=True)], -1)
        grad_a = (outer.t() @ x).to(a[0].dtype).mul_(ctx.scale).split(rank)
        grad_b = [
            (part.t() @ u).to(one.dtype).mul_(ctx.scale)
            for part, u, one in zip(parts, inner.split(rank, -1), b, strict=True)
        ]
        grad_x = grad @ weight.t() if ctx.needs_input_grad[0] else None
        pairs = [one for pair in zip(grad_a, grad_b, strict=True) for one in pair]
        return grad_x, None, None, None, *pairs
