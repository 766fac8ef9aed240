"""Who listens where: as `ss -ltn` would say, of a process and all below it."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path

LISTEN = "0A"  # the state in /proc/net/tcp


def family(pid: int) -> list[int]:
    """A process and all that it started, and those that they did."""
    out = [pid]
    for member in out:
        try:
            tasks = list(Path(f"/proc/{member}/task").iterdir())
            out += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:  # gone meanwhile
            continue
    return out


def listening(pid: int) -> set[str]:
    """Addresses with ports at which this process listens."""
    sockets = _sockets(pid)
    try:
        tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    except OSError:  # gone meanwhile
        return set()
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {_address(row[1]) for row in rows if row[3] == LISTEN and row[9] in sockets}


def _sockets(pid: int) -> set[str]:
    """By the numbers of their inodes."""
    out = set()
    try:
        files = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return out
    for file in files:
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file))
        except OSError:  # closed meanwhile
            continue
        if found:
            out.add(found[1])
    return out


def _address(text: str) -> str:
    """As in /proc: words of four bytes in the machine's order, a colon, and the port."""
    words, port = text.split(":")
    raw = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    return f"{ipaddress.ip_address(raw)} {int(port, 16)}"


def is_loopback(address: str) -> bool:
    host = ipaddress.ip_address(address.split()[0])
    mapped = getattr(host, "ipv4_mapped", None)
    return (mapped or host).is_loopback
