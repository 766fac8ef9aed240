"""Ends what a library has started for this process, when this process ends, by whatever means.

Ray's head node and raylet die with the driver that started them, but its agents and workers notice only after a while.
They are nobody's children then, so they must be known before: the library runs with a *mark* in its environment, which
its processes inherit, and a process beside this one follows the marked ones and all below them. The mark alone is not
enough, because a process that sets its own title overwrites its environment.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.process.guard import children_by_parent

MARK = "PACELINE_MARK"
FOLLOW_S = 0.5  # seconds between looks: what Python runs takes longer than that to set a title
LOOKING = 0.02  # of a core that may go to looking: a host of thousands of processes is looked at less often
QUIET = 3  # looks in a row without a process, before it is over: one may have forked while it was killed
CLOSE_S = 10.0  # seconds in which everything is gone


class Sweeper:
    """Start what is to end with this process inside of `marking`."""

    def __init__(self) -> None:
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._mark],
            stdin=subprocess.PIPE,  # nothing is written to it: its end is the end of this process
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        os.environ[MARK] = self._mark
        try:
            yield
        finally:
            del os.environ[MARK]

    def close(self) -> None:
        """End all that is left of it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:  # the kernel itself cannot end one of them now; it goes on trying beside us
            return


class _Followed:
    """Marked processes and all below them, by number and time of start: numbers are used again."""

    def __init__(self, mark: str):
        self._entry = f"{MARK}={mark}".encode()
        self._known: dict[int, str] = {}
        self._others: dict[int, str] = {}

    def look(self) -> list[int]:
        """Those that run now."""
        stats = children_by_parent()
        running = {stat.pid: stat for below in stats.values() for stat in below if stat.state != "Z"}
        self._known = {
            pid: start for pid, start in self._known.items() if pid in running and running[pid].start == start
        }
        self._others = {pid: start for pid, start in self._others.items() if pid in running}
        for pid, stat in running.items():
            if pid not in self._known and self._others.get(pid) != stat.start:
                (self._known if self._is_marked(pid) else self._others)[pid] = stat.start
        below = list(self._known)
        while below:
            found = [stat for pid in below for stat in stats.get(pid, []) if stat.pid in running]
            below = [stat.pid for stat in found if stat.pid not in self._known]
            self._known |= {stat.pid: stat.start for stat in found}
        return [pid for pid in self._known if pid != os.getpid()]

    def _is_marked(self, pid: int) -> bool:
        try:
            return self._entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # gone, or somebody else's
            return False


def _follow(followed: _Followed) -> None:
    """Until the other end of the standard input is closed or the parent, whose forks may keep it open, is gone."""
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    parent = os.getppid()
    pause = 0.0
    while not poll.poll(1000 * pause) and os.getppid() == parent:
        started = time.monotonic()
        followed.look()
        pause = max(FOLLOW_S, (time.monotonic() - started) / LOOKING)


def main() -> None:
    if sys.platform != "linux":  # nothing else tells whose child a process was
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    followed = _Followed(sys.argv[1])
    _follow(followed)
    quiet = 0
    while quiet < QUIET:
        running = followed.look()
        quiet = 0 if running else quiet + 1
        for pid in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
