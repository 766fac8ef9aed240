"""Workers as processes of this machine."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.coordinator import Lost, Report
from paceline.cluster.devices import choose_cores, choose_devices, my_cores
from paceline.process.channel import to_bytes
from paceline.process.child import Child, Ended, Mailbox

if TYPE_CHECKING:
    from paceline.cluster.messages import Call, WorkerSpec
    from paceline.config import Config


@dataclass(frozen=True)
class _Local:
    spec: WorkerSpec
    child: Child


class _Encoded:
    """A message that is pickled once, for several workers. It arrives as the message itself."""

    def __init__(self, message: object):
        self._data = to_bytes(message)

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        return pickle.loads, (self._data,)


class LocalProcesses:
    def __init__(self, config: Config, log: Path):
        self.host = "localhost"
        self.devices = choose_devices(config)
        cpu = self.devices[0] == "cpu"
        self.core_sets = choose_cores(config) if cpu else [()] * config.cluster.workers
        self._config = config
        self._log = log
        self.cores = len(my_cores()) or os.cpu_count() or 1
        self._workers: dict[int, _Local] = {}
        self._mailbox = Mailbox()

    def start(self, spec: WorkerSpec) -> None:
        if spec.number in self._workers:
            self._workers.pop(spec.number).child.close()
        threads = {"OMP_NUM_THREADS": str(spec.threads)} if spec.threads else {}
        child = Child("paceline.cluster.local_worker", self._mailbox, self._log, threads)
        self._workers[spec.number] = _Local(spec, child)
        child.send((self._config, spec))

    def send(self, workers: Sequence[int], call: Call) -> None:
        message = call if len(workers) == 1 else _Encoded(call)
        for worker in workers:
            if worker in self._workers:
                self._workers[worker].child.send(message)

    def receive(self, seconds: float) -> list[Report]:
        out: list[Report] = []
        specs = {worker.child: worker.spec for worker in self._workers.values()}
        for news in self._mailbox.take(seconds):
            spec = specs[news.child]
            out.append(Lost(spec.number, spec.generation) if isinstance(news, Ended) else news.message)
        return out

    def kill(self, worker: int) -> None:
        self._workers[worker].child.kill()

    def pid(self, worker: int) -> int:
        return self._workers[worker].child.pid

    def hosts(self) -> dict[int, str]:
        return {}

    def close(self) -> None:
        for worker in self._workers.values():
            worker.child.kill()  # all at once, before any is waited for
        for worker in self._workers.values():
            worker.child.close()
        self._workers.clear()
