"""The device that the settings name."""

from __future__ import annotations

import torch

from paceline.errors import UserError


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise UserError(f"model.device = '{name}' is not a device: use auto, cpu, cuda or cuda:N") from err
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"model.device = '{name}', but this machine has {torch.cuda.device_count()} CUDA devices")
    return device
