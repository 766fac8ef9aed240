"""Workers as processes of this machine, each with two pipes to the driver."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paceline.cluster.coordinator import Lost, Report
from paceline.cluster.messages import Call, Post
from paceline.config import Config


@dataclass
class _Process:
    post: Post
    process: subprocess.Popen[bytes]
    calls: Connection
    reports: Connection
    lost: bool = False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.calls.close()
        self.reports.close()


def my_cores() -> list[int]:
    """The cores that this process may use; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def put(pipe: Connection, message: object) -> None:
    """By value: `Connection.send` would hand over tensors as shared memory, which dies with its owner."""
    pipe.send_bytes(pickle.dumps(message))


def take(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


class LocalProcesses:
    host = "localhost"

    def __init__(self, config: Config, log: Path):
        """What workers print goes to the file `log`."""
        self._config, self._log = config, log
        self.cores = len(my_cores()) or os.cpu_count() or 1
        self._workers: dict[int, _Process] = {}

    def start(self, post: Post) -> None:
        if post.number in self._workers:
            self._workers[post.number].close()
        calls_read, calls_write = os.pipe()
        reports_read, reports_write = os.pipe()
        calls = Connection(calls_write, readable=False)
        reports = Connection(reports_read, writable=False)
        threads = {"OMP_NUM_THREADS": str(post.threads)} if post.threads else {}
        with open(self._log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "paceline.cluster.local_worker", str(calls_read), str(reports_write)],
                pass_fds=(calls_read, reports_write),
                env=os.environ | threads,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the driver, which ends its workers in its own time
            )
        os.close(calls_read)
        os.close(reports_write)
        self._workers[post.number] = _Process(post, process, calls, reports)
        self._put(self._workers[post.number], (self._config, post))

    def send(self, worker: int, call: Call) -> None:
        self._put(self._workers[worker], call)

    @staticmethod
    def _put(worker: _Process, message: object) -> None:
        try:
            put(worker.calls, message)
        except (BrokenPipeError, OSError):  # it is gone: its other pipe will say so
            return

    def receive(self, seconds: float) -> list[Report]:
        living = {w.reports: w for w in self._workers.values() if not w.lost}
        out: list[Report] = []
        for pipe in wait(list(living), seconds) if living else []:
            worker = living[pipe]  # type: ignore[index]
            try:
                while worker.reports.poll():
                    out.append(take(worker.reports))
            except (EOFError, OSError):
                worker.lost = True
                out.append(Lost(worker.post.number, worker.post.life))
        return out

    def kill(self, worker: int) -> None:
        self._workers[worker].process.kill()

    def pid(self, worker: int) -> int:
        return self._workers[worker].process.pid

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
