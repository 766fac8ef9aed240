"""GPUs by what rounds and updates go with, so that a run measured on one can be simulated on another."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UserError


@dataclass(frozen=True)
class GpuSpec:
    """As its maker states it."""

    bandwidth: float
    """Of the memory, TB/s."""
    compute: float
    """Dense bfloat16, PFLOP/s."""


GPUS = {
    "A100": GpuSpec(2.04, 0.312),
    "H100": GpuSpec(3.35, 0.989),
    "H200": GpuSpec(4.8, 0.989),
    "B200": GpuSpec(8.0, 2.25),
    "L40S": GpuSpec(0.864, 0.362),
    "RTX 4090": GpuSpec(1.01, 0.165),
}


def ratios(before: str, after: str) -> tuple[float, float]:
    """Times the bandwidth and the arithmetic that the second GPU has of the first."""
    one = _find(before, "--measured-on")
    other = _find(after, "--gpu")
    return other.bandwidth / one.bandwidth, other.compute / one.compute


def _find(name: str, option: str) -> GpuSpec:
    found = {key.replace(" ", "").lower(): spec for key, spec in GPUS.items()}.get(name.replace(" ", "").lower())
    if found is None:
        raise UserError(f"{option} {name} is not among the GPUs that are known: {', '.join(GPUS)}")
    return found
