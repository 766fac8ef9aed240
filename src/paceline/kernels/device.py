"""What kernels ask of the device that they run on."""

from __future__ import annotations

import functools

import torch

pdl = False
"""Whether a kernel may be launched before its predecessor has ended (programmatic dependent launch): it then asks for
what depends on nothing, and waits."""
PRETENDED = 8  # processors of a machine without a GPU, where an interpreter runs the kernels


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PRETENDED


def starts_early(device: torch.device) -> bool:
    return pdl and device.type == "cuda"
