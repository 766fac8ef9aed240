"""What floors are computed with: the bandwidth and the matmul rate that this device reaches, and what a token reads.

What decode.py, rl_step.py, roofline.py and tune_products.py have in common.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from paceline.model import Decoder


def copy_bandwidth(device: torch.device, repeat: int = 10) -> float:
    """Bytes per second, read and written, of a large copy. Not in a CUDA graph, which would leave the copy to a copy
    engine that is slower than the SMs."""
    size = 2**31 if device.type == "cuda" else 2**27
    a = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    b = torch.empty_like(a)
    return 2 * size / _median_seconds(device, lambda: b.copy_(a), repeat)


def matmul_rate(device: torch.device, repeat: int = 10) -> float:
    """FLOP per second of a large square matmul, 2 size^3 each; in bfloat16 on a GPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _median_seconds(device, lambda: a @ b, repeat)


def _median_seconds(device: torch.device, work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parameter_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def weights_per_token(model: Decoder) -> int:
    """Weights that a token is multiplied with: all parameters, less embeddings that are not the head too."""
    unused = 0 if model.config.tied else model.embed.weight.numel()
    return sum(p.numel() for p in model.parameters()) - unused
