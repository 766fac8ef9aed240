"""What this machine lets processes use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def machine_memory() -> int:
    """Bytes that processes on this machine may use together: what it has, or what a container is limited to."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_limits()])


def _limits() -> list[int]:
    """Of the control group that this process is in and of those around it, in both versions of control groups."""
    folders = [CGROUPS, CGROUPS / "memory"]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                own = CGROUPS / controllers / path.lstrip("/")
                folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(CGROUPS)]
    except (OSError, ValueError):  # no such system: what it has is all there is to know
        pass
    limits = []
    for folder in folders:
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                limits.append(int(text))
    return limits
