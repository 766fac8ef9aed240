"""How the driver reaches its workers: three ways behind one small interface."""

from __future__ import annotations

from typing import Protocol

from paceline.cluster.coordinator import Report
from paceline.cluster.messages import Call, Returned, WorkerSpec
from paceline.cluster.worker import Worker
from paceline.config import Config


class Transport(Protocol):
    host: str
    """By which workers reach the driver."""
    cores: int
    """CPU cores that the workers share."""

    def start(self, post: WorkerSpec) -> None:
        """Begin a new life of a worker, which will say that it is ready."""

    def send(self, worker: int, call: Call) -> None:
        """To a worker that may be gone already."""

    def receive(self, seconds: float) -> list[Report]:
        """What workers have said, waiting for so long if nobody has; `Lost` for those that have ended."""

    def kill(self, worker: int) -> None:
        """End a worker, whatever it is doing; it will be reported as lost."""

    def places(self) -> dict[int, str]:
        """Which worker is on which host, where that can be anywhere."""

    def close(self) -> None:
        """End all of them."""


class InProcess:
    """One worker, here. It works whenever the driver listens."""

    host = "localhost"
    cores = 1

    def __init__(self, config: Config):
        self._config = config
        self._reports: list[Report] = []
        self.worker: Worker | None = None

    def start(self, post: WorkerSpec) -> None:
        self.worker = Worker(self._config, post, self._reports.append)
        self._reports.append(self.worker.ready())

    def send(self, worker: int, call: Call) -> None:
        assert self.worker is not None
        value = getattr(self.worker, call.name)(*call.args)
        if call.number is not None:
            self._reports.append(Returned(worker, self.worker.post.life, call.number, value))

    def receive(self, seconds: float) -> list[Report]:
        assert self.worker is not None
        if not self._reports and self.worker.busy:
            self.worker.turn()
        reports = self._reports[:]
        self._reports.clear()
        return reports

    def kill(self, worker: int) -> None:
        raise AssertionError("a worker in the driver's own process cannot be lost")

    def places(self) -> dict[int, str]:
        return {}

    def close(self) -> None:
        self.worker = None
