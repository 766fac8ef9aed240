"""Workers as processes of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.coordinator import Lost, Report
from paceline.cluster.messages import Call, WorkerSpec
from paceline.config import Config
from paceline.process.child import Child, Ended, Mailbox


@dataclass(frozen=True)
class _Local:
    post: WorkerSpec
    child: Child


def my_cores() -> list[int]:
    """The cores that this process may use; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


class LocalProcesses:
    host = "localhost"

    def __init__(self, config: Config, log: Path):
        """What workers print goes to the file `log`."""
        self._config = config
        self._log = log
        self.cores = len(my_cores()) or os.cpu_count() or 1
        self._workers: dict[int, _Local] = {}
        self._mailbox = Mailbox()

    def start(self, post: WorkerSpec) -> None:
        if post.number in self._workers:
            self._workers.pop(post.number).child.close()
        threads = {"OMP_NUM_THREADS": str(post.threads)} if post.threads else {}
        child = Child("paceline.cluster.local_worker", self._mailbox, self._log, threads)
        self._workers[post.number] = _Local(post, child)
        child.send((self._config, post))

    def send(self, worker: int, call: Call) -> None:
        if worker in self._workers:
            self._workers[worker].child.send(call)

    def receive(self, seconds: float) -> list[Report]:
        out: list[Report] = []
        posts = {worker.child: worker.post for worker in self._workers.values()}
        for news in self._mailbox.take(seconds):
            post = posts[news.child]
            out.append(Lost(post.number, post.life) if isinstance(news, Ended) else news.message)
        return out

    def kill(self, worker: int) -> None:
        self._workers[worker].child.kill()

    def pid(self, worker: int) -> int:
        return self._workers[worker].child.pid

    def places(self) -> dict[int, str]:
        return {}

    def close(self) -> None:
        for worker in self._workers.values():
            worker.child.kill()  # all at once, before any is waited for
        for worker in self._workers.values():
            worker.child.close()
        self._workers.clear()
