"""The parent's side of child processes: start one, send to it, take what it says, know when it has ended."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from paceline.files.writing import open_to_append
from paceline.process.channel import MAX_BYTES, Full, QueuedChannel

READ_AHEAD = 1024  # messages of all children that wait to be taken; then children wait, and nothing is lost
ENDING = 5.0  # seconds for a guardian to kill all that is below it

# To the kernel the parent of a child is the thread that started it, and the child dies with that thread. So one thread
# starts them all, which lives as long as this process does.
_starter = ThreadPoolExecutor(1, thread_name_prefix="paceline-start")


@dataclass(frozen=True)
class Said:
    """A message, and when it came (`time.monotonic`)."""

    child: Child
    message: Any
    at: float


@dataclass(frozen=True)
class Ended:
    """Nothing more will come of a child."""

    child: Child
    reason: str


class Mailbox:
    """What several children say, in the order in which it came."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Said | Ended] = queue.Queue(READ_AHEAD)

    def put(self, news: Said | Ended) -> None:
        """Called by reading threads. Waits while the queue is full, unless its child is being closed."""
        while not news.child.closing:
            try:
                self._queue.put(news, timeout=0.2)
            except queue.Full:
                continue
            return

    def take(self, seconds: float = 0.0) -> list[Said | Ended]:
        """All there is, waiting for so long if there is nothing; not what was said by children that are closed."""
        out: list[Said | Ended] = []
        with contextlib.suppress(queue.Empty):
            out.append(self._queue.get(timeout=seconds) if seconds > 0 else self._queue.get_nowait())
            while True:
                out.append(self._queue.get_nowait())
        return [news for news in out if not news.child.closing]


@dataclass(eq=False)
class Child:
    """`python -m module`, connected to a mailbox here. With `guarded` it may run a user's code, which may start
    processes of its own: all of them end with it."""

    module: str
    mailbox: Mailbox
    log: Path | None = None
    """What it prints; None for nowhere."""
    environment: Mapping[str, str] = field(default_factory=dict)
    guarded: bool = False
    limit: int = MAX_BYTES
    """Bytes of the largest message that it may send."""
    executable: str = sys.executable
    """A Python that has the module."""
    closing: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        ours, theirs = socket.socketpair()
        watched, lifeline = os.pipe()  # the child's guardian watches one end; the other one closes with this process
        self._lifeline = lifeline
        command = [self.executable, "-m", self.module, str(theirs.fileno()), str(watched), str(os.getpid())]
        with theirs, self._output() as output:
            try:
                self.process = _starter.submit(
                    subprocess.Popen,
                    [*command, "guarded" if self.guarded else "plain"],
                    pass_fds=(theirs.fileno(), watched),
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is for the parent, which ends its children in its own time
                ).result()
            except BaseException:
                ours.close()
                os.close(lifeline)
                raise
            finally:
                os.close(watched)
        self.started = time.monotonic()
        self._channel = QueuedChannel(ours, self._said, self._ended, self.limit)

    def _output(self) -> IO[bytes]:
        return os.fdopen(open_to_append(self.log), "ab") if self.log else open(os.devnull, "ab")

    def _said(self, message: Any, at: float) -> None:
        self.mailbox.put(Said(self, message, at))

    def _ended(self, reason: str) -> None:
        self.mailbox.put(Ended(self, reason))

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: object) -> None:
        """Never waits. To one that is gone it goes nowhere; one that does not read is killed, which is reported as its
        end."""
        try:
            self._channel.send(message)
        except Full:
            self.kill()

    def kill(self) -> None:
        """End it, whatever it is doing. Its end is reported in the mailbox."""
        self._let_go()
        if not self.guarded:
            self.process.kill()

    def _let_go(self) -> None:
        """Its guardian, if it has one, kills all that is there."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def close(self) -> None:
        """End it and forget it: nothing more of it is reported."""
        self.closing = True
        self.kill()
        try:
            self.process.wait(ENDING)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.how_it_ended()  # one that the kernel itself cannot end now is left to it
        self._channel.close()

    def how_it_ended(self, seconds: float = ENDING) -> int | None:
        """Its exit code, or minus the signal that killed it; None if it has not ended within so many seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
