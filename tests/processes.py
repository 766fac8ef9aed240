"""What is left of processes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

PROMISED = 2.0  # seconds after which nothing is left of a trainer that was killed
SLOW = 10.0  # times as long, for a machine that runs many tests at once


def runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def gone(pids: Iterable[int], seconds: float = PROMISED * SLOW) -> bool:
    """Whether all of these end soon."""
    end = time.monotonic() + seconds
    pids = list(pids)
    while any(runs(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
