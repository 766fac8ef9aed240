"""Stopping a run when somebody asks for it: Ctrl-C, a scheduler's SIGTERM, a terminal that goes away, another thread.

The first time, a run ends at the next moment at which it can be saved; the second time at once. Nothing here knows what
a run is, and only the standard library is imported: worker and reward processes use it too.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """Raised where a run can stop, once it was asked to. Not an `Exception`, so that a library in between or a user's
    reward function does not take it for an error of its own."""


class StoppedAtOnce(KeyboardInterrupt):
    """Asked a second time: nothing more is saved."""

    def __init__(self, number: int, resume_command: str):
        then = f"; resume from the last checkpoint with: {resume_command}" if resume_command else ""
        super().__init__(f"stopped at once, without saving{then}")
        self.exit_code = 128 + number


class Stopping:
    """Whether a run was asked to stop, and by what."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The first signal that asked."""
        self.resume_command = ""
        """For what is said last."""
        self._immediately = False
        self._note: Callable[[str], None] = lambda text: None

    @property
    def asked(self) -> bool:
        return self.number is not None

    def ask(self) -> None:
        """The same as a first Ctrl-C, from any thread."""
        if self.number is None:
            self.number = int(signal.SIGINT)

    def check(self) -> None:
        """Here the run can stop."""
        if self.asked:
            raise Interrupted

    @contextmanager
    def listening(self, note: Callable[[str], None] | None = None) -> Iterator[None]:
        """Take signals until the end of the block, if this is the main thread: no other may. Can be nested, which also
        takes them back from a library that has set its own handlers meanwhile. `note` is called with a line for the
        user."""
        if note is not None:
            self._note = note
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {}
        try:
            for number in ASKS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup: who starts it that way wants it to outlive the terminal
                before[number] = signal.signal(number, self._on_signal)
            yield
        finally:
            for number, handler in before.items():
                # None is a handler that Python cannot put back, because it did not come from Python.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """In this block the first signal stops at once too: what is being done need not be finished to be saved."""
        before = self._immediately
        self._immediately = True
        try:
            self.check()
            yield
        finally:
            self._immediately = before

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            if number == signal.SIGHUP:  # kernel, shell and service manager each say that a terminal is gone
                return
            raise StoppedAtOnce(number, self.resume_command)
        self.number = number
        if self._immediately:
            raise Interrupted
        again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM again"
        try:
            self._note(f"stopping at the next place where the run can be saved; {again} to stop without saving")
        except RuntimeError:  # the signal came while the same stream was being written to
            return


def leave_to_driver() -> None:
    """For processes that a run has started. Slurm and systemd send SIGTERM to all processes of a job, and Ctrl-C and a
    lost terminal reach all in the foreground; but it is the driver that ends them, after it has saved with their help.
    A handler that does nothing, because a signal that is ignored would stay so in programs that they start."""
    for number in ASKS:
        signal.signal(number, _nothing)


def _nothing(number: int, frame: FrameType | None) -> None:
    return
