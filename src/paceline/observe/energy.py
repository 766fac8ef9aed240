"""Energy that a GPU has used, by NVML's counter: joules since the driver was loaded."""

from __future__ import annotations

import torch


class EnergyMeter:
    def __init__(self, device: torch.device):
        """`joules` is None where there is no GPU, no NVML, or no counter."""
        self._handle = None
        if device.type != "cuda":
            return
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            # By its PCI address: the driver's order of devices need not be CUDA's.
            properties = torch.cuda.get_device_properties(device)
            domain, bus, number = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
            address = f"{domain:08x}:{bus:02x}:{number:02x}.0"
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
            self._read = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000
            self._read()
        except pynvml.NVMLError:
            self._handle = None

    def joules(self) -> float | None:
        """Since the driver was loaded: take differences (`spent`)."""
        return self._read() if self._handle is not None else None


def spent(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
