"""How the driver reaches its workers: one small interface, and the transports by name. A new one is a file with a class
and a line here; `cluster.backend` then takes its name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.cluster.coordinator import Report
    from paceline.cluster.messages import Call, WorkerSpec
    from paceline.config import Config

TRANSPORTS = {
    "in_process": "paceline.cluster.in_process:InProcess",  # `local`, if there is one worker only
    "local": "paceline.cluster.local:LocalProcesses",
    "ray": "paceline.cluster.ray_actors:RayActors",
}
"""Name -> module and class. Loaded when used: Ray need not be installed, and only workers need all of PyTorch."""


class Transport(Protocol):
    host: str
    """By which workers reach the driver."""
    cores: int
    """CPU cores that the workers share."""
    devices: list[str]
    """Of each worker."""
    core_sets: list[tuple[int, ...]]
    """For each worker the CPU cores that are its own; empty where it may use any."""

    def __init__(self, config: Config, log: Path):
        """What workers print goes to the file `log`, where they are processes of this machine."""

    def start(self, spec: WorkerSpec) -> None:
        """Begin a new generation of a worker, which will say that it is ready."""

    def send(self, workers: Sequence[int], call: Call) -> None:
        """The same to each of these, which may be gone already."""

    def receive(self, seconds: float) -> list[Report]:
        """What workers have said, waiting for so long if nobody has; `Lost` for those that have ended."""

    def kill(self, worker: int) -> None:
        """End a worker, whatever it is doing; it will be reported as lost."""

    def hosts(self) -> dict[int, str]:
        """Which worker is on which host, where that can be anywhere."""

    def close(self) -> None:
        """End all of them."""


def load_transport(name: str) -> type[Transport]:
    if name not in TRANSPORTS:
        raise UserError(f"cluster.backend={name} is unknown; there are: {', '.join(TRANSPORTS)}")
    module, _, kind = TRANSPORTS[name].partition(":")
    transport: type[Transport] = getattr(import_module(module), kind)
    return transport
