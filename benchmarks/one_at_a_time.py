"""Engines that start together and are measured one at a time: most of what a serving engine takes is its start.

Each process calls `wait_for_all` when it has started, and measures inside `alone`.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LOOK_S = 0.2


def wait_for_all(folder: Path, name: str, names: Sequence[str], seconds: float) -> None:
    """Say that `name` has started, or has failed to, and wait until all of them have said so: starting engines disturb
    the one that is measured."""
    (folder / f"{name}.started").touch()
    deadline = time.monotonic() + seconds
    while missing := [each for each in names if not (folder / f"{each}.started").exists()]:
        if time.monotonic() > deadline:
            raise SystemExit(f"{', '.join(missing)} did not start within {seconds:.0f} s")
        time.sleep(LOOK_S)


def forget(folder: Path, names: Sequence[str]) -> None:
    """Before a new start."""
    for name in names:
        (folder / f"{name}.started").unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else measures meanwhile; whoever dies leaves the turn to the next."""
    with (folder / "turn.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
