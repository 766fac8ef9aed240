"""What kernels ask of the device that they run on."""

from __future__ import annotations

import functools

import torch

PRETENDED = 8  # processors of a machine without a GPU, where an interpreter runs the kernels


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PRETENDED
