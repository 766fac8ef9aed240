"""Which workers are there: what the driver hears of them, who is silent for too long, who is started again.

A worker that dies or hangs is lost: it is started again, a few times, and takes part again from the next rollout on. An
error is not a loss: it would come again, so it is raised here as `WorkerFailed`, and the run is saved and stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.cluster.coordinator import Lost, Report
from paceline.cluster.messages import LOADING, Alive, Failed, Noted, Ready, WorkerSpec
from paceline.errors import RunError, UserError, WorkerFailed

if TYPE_CHECKING:
    from paceline.cluster.transport import Transport
    from paceline.config import Config

WAITING = 1.5  # times cluster.timeout_s: for one that waits for others, whose own deadline is cluster.timeout_s
GRACE = 0.25  # of cluster.timeout_s: for the rest of a group to notice what one of them has noticed
POLL_S = 0.05  # seconds for which the driver waits for reports before it looks after other things


@dataclass
class _Record:
    """What the driver knows of a worker."""

    generation: int = 1
    restarts: int = 0
    alive: bool = False
    """It has said that it is ready, and is not lost."""
    starting_since: float | None = None
    """When it was started, while it is loading (`time.monotonic`)."""
    heard: float = 0.0
    """When a report of it or a call to it was sent last (`time.monotonic`)."""
    waits: bool = False
    """It has said that it can do nothing before others do something."""
    failed: bool = False
    """It has raised an error, which was reported; what follows from that is not."""


class Liveness:
    def __init__(
        self,
        config: Config,
        transport: Transport,
        make_spec: Callable[[int, int], WorkerSpec],
        note: Callable[[str], None],
        on_error: Callable[[str, str], object],
    ):
        """`make_spec` makes the spec of a generation of a worker; `note` hears of losses; `on_error` keeps tracebacks
        of errors that do not stop the run."""
        self.config = config
        self.transport = transport
        self.note = note
        self.on_error = on_error
        self._make_spec = make_spec
        self._records = [_Record() for _ in range(config.cluster.workers)]
        self.group: dict[int, int] = {}
        """Workers of the process group that was formed last, with their generations then."""
        self.facts: Ready | None = None
        """What workers have said when they were ready."""
        self.lost: list[int] = []
        """Workers that were lost, in order."""
        self.missed: dict[int, float] = {}
        """Workers that do not take part at present, and since when by the wall clock."""
        self.absences: list[tuple[int, float, float]] = []
        """Workers that came back: since when they were missed, and until when."""

    # Who is there

    @property
    def workers(self) -> tuple[int, ...]:
        """Those that decode and learn; one that was started again has to wait for the next step."""
        return tuple(w for w, generation in self.group.items() if self.generation(w) == generation)

    @property
    def living(self) -> set[int]:
        """`workers`, and those that join with the next rollout."""
        return {w for w, record in enumerate(self._records) if record.alive}

    def generation(self, worker: int) -> int:
        return self._records[worker].generation

    def form(self, workers: Sequence[int]) -> None:
        """These have formed a process group."""
        self.group = {w: self.generation(w) for w in workers}
        for worker in set(self.missed) & set(workers):
            self.absences.append((worker, self.missed.pop(worker), time.time()))

    def start(self, worker: int) -> None:
        record = self._records[worker]
        self.transport.start(self._make_spec(worker, record.generation))
        record.starting_since = time.monotonic()

    def await_all(self) -> None:
        """Until all are ready. One that dies meanwhile is started again, like any other."""
        while not all(record.alive for record in self._records):
            self.listen(POLL_S)
            for worker, record in enumerate(self._records):
                if not record.alive and record.starting_since is None:
                    raise RunError(
                        f"worker {worker} ended before it was ready, {record.restarts + 1} times (cluster.restarts); "
                        f"see {self._log}, and go on with: paceline train --resume {self.config.run_dir}"
                    )

    # Listening

    def sent(self, worker: int) -> None:
        """It was sent a call: its timeout counts from now."""
        self._records[worker].heard = time.monotonic()
        self._records[worker].waits = False

    def hurry(self, workers: set[int]) -> None:
        """One of a group has noticed that it is broken: the others do so soon, or they hang."""
        for worker in workers:
            self._records[worker].waits = False
            self._records[worker].heard = time.monotonic() - (1 - GRACE) * self.config.cluster.timeout_s

    def listen(self, seconds: float, expected: Sequence[int] = ()) -> list[Report]:
        """What the living say, less what is only for here. `expected` are those that should say something."""
        out: list[Report] = []
        for report in self.transport.receive(seconds):
            record = self._records[report.worker]
            if report.generation != record.generation:
                continue
            record.heard = time.monotonic()
            record.waits = isinstance(report, Alive) and report.waits
            if isinstance(report, Failed) and report.kind != "peer":
                self._take_failure(report)
            elif isinstance(report, Ready):
                record.alive = True
                record.starting_since = None
                self.facts = report
            elif isinstance(report, Noted):
                self.note(report.sentence)
            elif isinstance(report, Lost):
                self._lose(report.worker)
                out.append(report)
            elif not isinstance(report, Alive):
                out.append(report)
        return out + self._find_silent(expected)

    def _find_silent(self, expected: Sequence[int]) -> list[Report]:
        """Those that have something to do and say nothing, or take too long to load, are lost from now on."""
        c = self.config.cluster
        now = time.monotonic()
        out: list[Report] = []
        for worker in expected:
            record = self._records[worker]
            silence = now - record.heard
            if record.alive and silence > c.timeout_s * (WAITING if record.waits else 1.0):
                out.append(Lost(worker, record.generation))
                self.give_up(worker, f"has said nothing for {silence:.0f} s (cluster.timeout_s)")
        for worker, record in enumerate(self._records):
            since = record.starting_since
            if since is not None and now - since > c.start_timeout_s:
                self.give_up(worker, f"was not ready after {now - since:.0f} s (cluster.start_timeout_s)")
        return out

    def _take_failure(self, report: Failed) -> None:
        """An error in a worker stops the run; but one that was started again and cannot load is done without."""
        worker = report.worker
        record = self._records[worker]
        if report.doing == LOADING and self.workers:
            self.on_error(f"worker {worker}, {report.doing}", report.trace)
            self.give_up(worker, f"cannot be started again: {report.error}", again=False)
            return
        if record.failed and report.call is None:
            return  # its first error was reported, and this one follows from that
        record.failed = True
        if report.kind == "user" and not self.workers:
            raise UserError(report.error)
        if report.kind == "disk":
            raise OSError(report.error)
        raise WorkerFailed(worker, f"worker {worker} failed in {report.doing}: {report.error}", report.trace)

    # Losing

    def give_up(self, worker: int, why: str, again: bool = True) -> None:
        """Do without a worker that is there, from now on."""
        self.note(f"worker {worker} {why}; it is given up")
        self.transport.kill(worker)
        self._lose(worker, again)

    def _lose(self, worker: int, again: bool = True) -> None:
        before = self._records[worker]
        again = again and before.restarts < self.config.cluster.restarts
        # Whatever the former generation still says is ignored.
        self._records[worker] = _Record(before.generation + 1, before.restarts + again, heard=before.heard)
        self.lost.append(worker)
        self.missed.setdefault(worker, time.time())
        self.note(
            f"worker {worker} was lost"
            + ("; the others go on" if self.workers else "")
            + ("; it is started again" if again else "; it is not started again (cluster.restarts)")
        )
        if again:
            self.start(worker)

    @property
    def _log(self) -> str:
        """Where workers' own words are."""
        return "Ray's logs" if self.config.cluster.backend == "ray" else f"{self.config.run_dir}/workers.log"

    def all_lost(self) -> RunError:
        return RunError(
            f"so many workers were lost at once ({', '.join(map(str, self.lost[-4:]))}) that the state of the run went "
            f"with them; see {self._log}, and go on from the last checkpoint with: "
            f"paceline train --resume {self.config.run_dir}"
        )
