"""Where the kernels of `fused_triton` stand in for PyTorch: on a GPU, unless a backward pass will need the steps."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fuses(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in DTYPES and not torch.is_grad_enabled()
