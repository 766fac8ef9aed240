"""Where our kernels replace PyTorch's: on a GPU, and within a layer only where no backward pass will follow."""

from __future__ import annotations

import torch
from torch import Tensor

interpreted = False
"""Whether kernels run on a CPU as well, in Triton's interpreter; tests set it."""


def has_kernels(x: Tensor) -> bool:
    """Whether our kernels run on tensors like this one: on a GPU (or interpreted), in any type but float64."""
    return (x.is_cuda or interpreted) and x.dtype != torch.float64


def fuses(x: Tensor) -> bool:
    """Whether a layer on `x` runs on fused kernels, which have no backward pass."""
    return has_kernels(x) and not torch.is_grad_enabled()
