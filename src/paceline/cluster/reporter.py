"""A worker's word to the driver: reports, and signs of life in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.cluster.messages import Alive, Noted, WorkerSpec

if TYPE_CHECKING:
    from paceline.cluster.coordinator import Report

QUIET_S = 0.1  # seconds after which a worker that is at work says so


class Reporter:
    def __init__(self, spec: WorkerSpec, send: Callable[[Report], None]):
        self.worker = spec.number
        self.generation = spec.generation
        self._send = send
        self._last = 0.0

    def tell(self, report: Report) -> None:
        self._last = time.monotonic()
        self._send(report)

    def note(self, sentence: str) -> None:
        """For the user."""
        self.tell(Noted(self.worker, self.generation, sentence))

    @property
    def quiet(self) -> bool:
        """Whether the driver has heard nothing for a while."""
        return time.monotonic() - self._last > QUIET_S

    def still_alive(self) -> None:
        """Called often; speaks seldom."""
        if self.quiet:
            self.tell(Alive(self.worker, self.generation))

    def waits(self) -> None:
        """It can do nothing before others do something."""
        self.tell(Alive(self.worker, self.generation, waits=True))
