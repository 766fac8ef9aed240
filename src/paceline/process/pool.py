"""What pools of child processes have in common: each process imports a user's code, says so, and then replies to what
it is sent; what all of them say is taken in turn."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from paceline.errors import UserError
from paceline.process.child import Child, Ended, Mailbox, Said

POLL = 0.05  # seconds for which a caller that waits lets the processes work before it looks at the clock


class PooledProcess(Protocol):
    child: Child
    ready: bool
    """Whether it has imported everything."""


class ImportedMessage(Protocol):
    """A process has imported everything, or says why it cannot."""

    @property
    def problem(self) -> str | None: ...


P = TypeVar("P", bound=PooledProcess)


class ChildPool(ABC, Generic[P]):
    imported_message: type[ImportedMessage]

    def __init__(self, log: Path | None):
        self._log = log
        self._mailbox = Mailbox()
        self._processes: list[P] = []

    def _wait_until_ready(self) -> None:
        while not all(process.ready for process in self._processes):
            self._poll(POLL)

    def _poll(self, seconds: float) -> None:
        for message in self._mailbox.take(seconds):
            process = next(p for p in self._processes if p.child is message.child)
            if isinstance(message, Ended):
                self._ended(process, message.reason)
            elif isinstance(message.message, self.imported_message):
                if message.message.problem:
                    raise UserError(message.message.problem)
                process.ready = True
                self._imported(message.message)
            else:
                self._replied(process, message)
        for process in self._processes:
            self._check_time(process)
        self._feed()

    @abstractmethod
    def _imported(self, message: Any) -> None: ...

    @abstractmethod
    def _replied(self, process: P, message: Said) -> None: ...

    @abstractmethod
    def _ended(self, process: P, reason: str) -> None: ...

    @abstractmethod
    def _check_time(self, process: P) -> None: ...

    @abstractmethod
    def _feed(self) -> None:
        """Send what waits to the processes that can take it."""

    @property
    def _see_log(self) -> str:
        return f"; see {self._log}" if self._log else ""

    def close(self) -> None:
        for process in self._processes:
            process.child.close()
        self._processes = []


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
