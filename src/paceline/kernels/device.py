"""What kernels ask of the device that they run on."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

pdl = True
"""Whether a kernel may be launched before its predecessor has ended (programmatic dependent launch): it then asks for
what depends on nothing, and waits."""
ahead_bytes = 1 << 20
"""Of the weights of a product, so many are asked for before its turn. More of them was slower on an H200, the more the
slower: what is asked for early comes in the way of what is needed now."""
PRETENDED = 8  # processors of a machine without a GPU, where an interpreter runs the kernels


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PRETENDED


def starts_early(device: torch.device) -> bool:
    return pdl and _can_start_early(device)


@functools.cache
def _can_start_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def copy_bandwidth(device: torch.device, repeat: int = 10) -> float:
    """Bytes per second, read and written, of a large copy: what floors are reckoned with. Not in a graph, which would
    leave the copy to an engine that is slower than the processors."""
    size = 2**31 if device.type == "cuda" else 2**27
    a = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    b = torch.empty_like(a)
    return 2 * size / _median_seconds(device, lambda: b.copy_(a), repeat)


def product_rate(device: torch.device, repeat: int = 10) -> float:
    """Operations per second of a large product."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _median_seconds(device, lambda: a @ b, repeat)


def _median_seconds(device: torch.device, work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        wait_for(device)
        started = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def wait_for(device: torch.device) -> None:
    """Until all that it was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
