"""Properties of the device that kernels ask for before they are launched."""

from __future__ import annotations

import functools

import torch

pdl = True
"""Whether kernels use programmatic dependent launch (PDL) where the device has it: a kernel is launched before its
predecessor has ended, loads what does not depend on it (weights), and then waits for it."""
prefetch_bytes = 1 << 20
"""Bytes of a matmul's weights that it prefetches into the L2 cache before it waits for its predecessor. On an H200 more
was slower, the more the slower: what is fetched early delays what is needed now."""
INTERPRETED_SMS = (
    8  # streaming multiprocessors that a CPU is taken to have, where Triton's interpreter runs the kernels
)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETED_SMS


def use_pdl(device: torch.device) -> bool:
    """Whether kernels on this device are launched with PDL."""
    return pdl and _supports_pdl(device)


@functools.cache
def _supports_pdl(device: torch.device) -> bool:
    """From Hopper (compute capability 9.0) on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
