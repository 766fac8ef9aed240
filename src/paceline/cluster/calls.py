"""Calls from the driver to its workers: sent, awaited, and broken off when a worker is lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.cluster.coordinator import Lost
from paceline.cluster.liveness import POLL_S, Liveness
from paceline.cluster.messages import Call, Failed, Returned

if TYPE_CHECKING:
    from paceline.cluster.transport import Transport

NOTICE_S = 5.0  # seconds in which the loss of a worker that others have noticed is known here

Named = tuple[str, tuple[Any, ...]]
"""A call: the name of a worker's method, and arguments."""


class Broken(Exception):
    """What several were doing together failed: somebody was lost, or they could not reach each other."""

    def __init__(self, reports: Sequence[Failed] = ()):
        super().__init__()
        self.reports = reports

    def reason(self) -> str:
        return "; ".join(sorted({f"worker {r.worker}: {r.error}" for r in self.reports})) or "no reason was given"


class Calls:
    def __init__(self, transport: Transport, liveness: Liveness):
        self.transport = transport
        self.liveness = liveness
        self._number = 0

    def send(self, workers: Sequence[int], name: str, *args: Any) -> None:
        """Have these do something, and do not wait. Calls are carried out in the order in which they are sent."""
        self._send(workers, Call(name, args))

    def _send(self, workers: Sequence[int], call: Call) -> None:
        for worker in workers:
            self.liveness.sent(worker)
        self.transport.send(workers, call)

    def each(self, calls: dict[int, Named]) -> dict[int, Any]:
        """Call these workers and wait for what they return. Raises `Broken` if one of them is lost."""
        self._number += 1
        number = self._number
        same: dict[int, list[int]] = {}  # by call: workers that get the same, which is pickled once
        for worker, named in calls.items():
            same.setdefault(id(named), []).append(worker)
        for workers in same.values():
            self._send(workers, Call(*calls[workers[0]], number))
        values: dict[int, Any] = {}
        failures: list[Failed] = []
        lost = len(self.liveness.lost)
        open_calls = set(calls) & self.liveness.living
        broken = len(open_calls) < len(calls)
        while open_calls:
            for report in self.liveness.listen(POLL_S, sorted(open_calls)):
                if isinstance(report, Lost) and report.worker in calls:
                    open_calls.discard(report.worker)
                    broken = True
                elif isinstance(report, Returned | Failed) and report.worker in calls and report.call == number:
                    open_calls.discard(report.worker)
                    if isinstance(report, Returned):
                        values[report.worker] = report.value
                        continue
                    failures.append(report)
                    if len(failures) == 1:
                        self.liveness.hurry(open_calls)
        if broken or failures:
            # Those that waited for a lost worker may hear of it before the driver does.
            end = time.monotonic() + NOTICE_S
            while len(self.liveness.lost) == lost and time.monotonic() < end:
                self.liveness.listen(POLL_S)
            raise Broken(failures)
        return values
