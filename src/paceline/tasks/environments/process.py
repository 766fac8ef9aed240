"""One process that runs environments, and what it has been sent and not replied to. `EnvironmentPool` owns some."""

from __future__ import annotations

import time
from pathlib import Path

from paceline.process.child import Child, Mailbox
from paceline.tasks.environments.messages import EnvironmentJob, ToolboxSpec

MAX_REPLY = 2**24  # bytes of one message from a process
THREADS = 64  # steps at the same time in one process


class EnvironmentProcess:
    def __init__(self, spec: ToolboxSpec, mailbox: Mailbox, log: Path | None):
        self.spec = spec
        self.mailbox = mailbox
        self.log = log
        self.deaths = 0
        """In a row, without a result in between."""
        self.start()

    def start(self) -> None:
        self.jobs: dict[int, EnvironmentJob] = {}
        self.ready = False
        self.retired = False
        """A call hangs in it: it gets no other, and ends when those are done that it has."""
        self.child = Child("paceline.tasks.environments.worker", self.mailbox, self.log, guarded=True, limit=MAX_REPLY)
        self.child.send(self.spec)

    def restart(self) -> None:
        self.child.close()
        self.start()

    def can_take(self, job: EnvironmentJob) -> bool:
        if not self.ready or self.retired or any(other.alone for other in self.jobs.values()):
            return False
        return not self.jobs if job.alone else len(self.jobs) < THREADS

    def send(self, job: EnvironmentJob) -> None:
        """Raises what pickle raises if the sample's columns cannot be sent."""
        job.sent = time.monotonic()
        self.child.send(job)
        self.jobs[job.number] = job

    def overdue(self, timeout_s: float) -> list[EnvironmentJob]:
        """Those that took too long; one that has to catch up may take longer."""
        now = time.monotonic()
        return [job for job in self.jobs.values() if now - job.sent > timeout_s * max(1, len(job.actions))]
