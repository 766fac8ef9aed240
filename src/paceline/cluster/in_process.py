"""One worker, in the driver's own process. It works whenever the driver listens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.messages import Call, Returned, WorkerSpec
from paceline.cluster.worker import Worker
from paceline.errors import UserError
from paceline.setup.device import choose_device

if TYPE_CHECKING:
    from paceline.cluster.coordinator import Report
    from paceline.config import Config


class InProcess:
    def __init__(self, config: Config, log: Path):
        if config.cluster.workers != 1:
            raise UserError("in_process has one worker: set cluster.workers=1, or cluster.backend=local")
        self.host = "localhost"
        self.cores = 1
        self.devices = [str(choose_device(config.model.device))]
        self.core_sets: list[tuple[int, ...]] = [()]
        self._config = config
        self._reports: list[Report] = []
        self.worker: Worker | None = None

    def start(self, spec: WorkerSpec) -> None:
        self.worker = Worker(self._config, spec, self._reports.append)
        self._reports.append(self.worker.ready())

    def send(self, workers: Sequence[int], call: Call) -> None:
        assert self.worker is not None
        spec = self.worker.spec
        value = getattr(self.worker, call.name)(*call.args)
        if call.number is not None:
            self._reports.append(Returned(spec.number, spec.generation, call.number, value))

    def receive(self, seconds: float) -> list[Report]:
        assert self.worker is not None
        if not self._reports and self.worker.busy:
            self.worker.run_once()
        elif not self._reports:
            time.sleep(seconds)  # what it waits for comes from elsewhere: rewards, tools
        reports = self._reports[:]
        self._reports.clear()
        return reports

    def kill(self, worker: int) -> None:
        raise AssertionError("a worker in the driver's own process cannot be lost")

    def hosts(self) -> dict[int, str]:
        return {}

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.worker = None
