"""A process of ours ends with its parent, whatever it is doing, and so does everything that it has started.

On Linux the kernel kills a child when its parent dies (PR_SET_PDEATHSIG), also in the middle of a user's function that
never returns. What a user's function has started itself is not covered by that: such a process gets a *guardian*, which
runs no code but this. Orphans below it become its children (PR_SET_CHILD_SUBREAPER), so it finds and kills all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_MS = 500  # between looks at the parent: a process that it has forked may keep the lifeline open after its death
SWEEPS = 100  # over the processes below: one may fork while it is being killed


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end at once if it is gone already."""
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def stand_guard(lifeline: int) -> None:
    """Split off a child, in which this returns. The guardian stays in here: it waits until the other end of `lifeline`
    is closed, by whatever means, or the child has ended; kills all that is left below it, and ends as the child did."""
    guardian = os.getpid()
    if sys.platform != "linux":
        return
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        os.close(lifeline)
        die_with_parent(guardian)
        return
    try:
        _watch(child, lifeline)
    finally:
        os._exit(1)


def _watch(child: int, lifeline: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the lifeline says when it is over
    _close_all_but(lifeline)
    exited = os.pidfd_open(child)
    poll = select.poll()
    poll.register(exited, select.POLLIN)
    poll.register(lifeline, select.POLLIN)  # nothing is ever written to it: this is its end
    parent = os.getppid()
    while not poll.poll(PARENT_MS) and os.getppid() == parent:
        continue
    status = _kill_below(child)
    code = os.waitstatus_to_exitcode(status) if status is not None else 1
    if code < 0:  # as the child ended, so that the parent can tell a kill from an exit
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _kill_below(child: int) -> int | None:
    """Kill everything below this process -> how `child` ended."""
    status = None
    for _ in range(SWEEPS):
        status = _reap(child, status)
        below = descendants(os.getpid())
        if not below:
            return status
        for pid in below:
            if pid == child and status is None and _ended(pid):
                continue  # it has ended by itself; how, is found out by reaping it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        select.select([], [], [], 0.005)
    return status


def _reap(child: int, status: int | None) -> int | None:
    while True:
        try:
            pid, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            status = how


def _ended(pid: int) -> bool:
    stat = process_stat(str(pid))
    return stat is None or stat.state == "Z"


@dataclass(frozen=True)
class ProcessStat:
    pid: int
    state: str
    """One letter; Z is one that has ended and was not waited for."""
    parent: int
    start: str
    """Ticks since the machine started. With the number it names a process for good."""


def process_stat(pid: str) -> ProcessStat | None:
    """Of a process that is there. Its name, in brackets, may hold anything."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return ProcessStat(int(pid), fields[0], int(fields[1]), fields[19])


def children_by_parent() -> dict[int, list[ProcessStat]]:
    """All processes of this machine."""
    children: dict[int, list[ProcessStat]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := process_stat(entry)):
            children.setdefault(stat.parent, []).append(stat)
    return children


def descendants(pid: int) -> list[int]:
    """All processes below one, those that have ended and were not waited for included."""
    children = children_by_parent()
    found: list[int] = []
    below = [stat.pid for stat in children.get(pid, [])]
    while below:
        found += below
        below = [stat.pid for one in below for stat in children.get(one, [])]
    return found


def _close_all_but(kept: int) -> None:
    """The guardian must not keep pipes open whose end tells others that the child is gone."""
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
        if descriptor != kept:
            with contextlib.suppress(OSError):  # the one that the listing itself had open
                os.close(descriptor)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
