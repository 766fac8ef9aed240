"""How threads wait for each other on a CPU that others use too.

OpenMP's threads (torch brings GNU's libgomp) spin while they wait for each other. Where another process has one of
their cores, the thread that works waits for its core while the others spin away theirs, and decoding, which waits
hundreds of times per token, becomes several times slower (`benchmarks/waiting.py`). Passive waiting is chosen by
OMP_WAIT_POLICY, which OpenMP reads once, when torch is loaded: so before that.
"""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

POLICY = "OMP_WAIT_POLICY"
GIVEN = (POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Whoever has set one of these has decided."""
BUSY_CORES = 0.4
"""Cores in use by others from which on threads wait passively."""
SAMPLE_S = 0.1
CORE = re.compile(r"cpu[0-9]+")
STAT = Path("/proc/stat")
QUOTAS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CpuUse:
    cores: int
    """That this process may use."""
    busy: float
    """How many of them are in use."""
    quota: float | None = None
    """Cores' worth of time that a container is limited to."""

    @property
    def shared(self) -> bool:
        """Whether a thread may have to wait for a core."""
        limited = self.quota is not None and self.quota < self.cores
        return self.cores > 1 and (self.busy >= BUSY_CORES or limited)

    def describe(self) -> str:
        words = f"{self.busy:.1f} of {self.cores} cores busy"
        return words + (f", {self.quota:g} allowed by the container" if self.quota is not None else "")


def measure_use(seconds: float = SAMPLE_S) -> CpuUse:
    """Of the cores that this process may use, now; all idle where the system does not say."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    before = _times(allowed)
    time.sleep(seconds if before else 0.0)
    after = _times(allowed)
    busy = 0.0
    for core, (idle, total) in after.items():
        spent = total - before.get(core, (0, total))[1]
        busy += 1 - (idle - before[core][0]) / spent if spent > 0 else 0.0
    return CpuUse(len(allowed), busy, _quota())


def _times(allowed: set[int]) -> dict[int, tuple[int, int]]:
    """(idle, all) ticks of each core so far."""
    try:
        rows = [line.split() for line in STAT.read_text().splitlines()]
    except OSError:
        return {}
    cores = {
        int(row[0][3:]): [int(word) for word in row[1:]] for row in rows if row and row[0][:3] == "cpu" and row[0][3:]
    }
    return {core: (ticks[3] + ticks[4], sum(ticks[:8])) for core, ticks in cores.items() if core in allowed}


def _quota() -> float | None:
    try:
        limit, period = (QUOTAS / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):  # no such system
        return None


_chosen: list[CpuUse] = []


def choose_waiting() -> None:
    """Have threads wait passively if the CPU is in use, unless the user has decided or torch is loaded already."""
    if "torch" in sys.modules or any(name in os.environ for name in GIVEN):
        return
    use = measure_use()
    if use.shared:
        os.environ[POLICY] = "PASSIVE"
        _chosen.append(use)


def advice(threads: int) -> str | None:
    """For a run on a CPU that others use: that its threads wait passively, or how they would, if torch was loaded
    before that could be chosen."""
    if threads < 2:
        return None
    if _chosen:
        return f"{_chosen[-1].describe()} at the start: threads wait for each other passively ({POLICY}=PASSIVE)"
    if any(name in os.environ for name in GIVEN):
        return None
    use = measure_use()
    if not use.shared:
        return None
    return (
        f"{use.describe()}: threads that wait for each other spin and slow each other down; start Python with "
        f"{POLICY}=PASSIVE, or set model.threads=1"
    )
