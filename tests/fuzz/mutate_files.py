"""Damage for files and folders that come from outside: bytes, JSON values, safetensors, links and pipes.

Everything is drawn from a `random.Random`, so a trial can be repeated from its number alone.
"""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import json
import os
import random
import shutil
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import UserError

DEADLINE_S = 10
"""Of one trial; then it counts as a hang."""

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 10**12, 2**63, -(2**31), 10**40, 0.0, 0.5, -1.5, 1e-300, 1e308, 1e39,
    "", "x", "1", "../../etc/passwd", "/etc/passwd", "\0", "é\u2028", "a" * 5000,
    [], [[]], {}, [1, 2], [None], ["x", 3], {"a": {"b": []}}, {"": None}, [0.5], [10**9], [-1], "fp8", "float8_e4m3fn",
]  # fmt: skip
RAW = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b'"\\ud800"',
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\xff\xfe",
    b"\0",
    b"9" * 5000,
]
"""What JSON's own values cannot say."""


class Hang(BaseException):
    """Not an Exception, so that nothing under test can swallow it."""


@contextmanager
def deadline(seconds: int = DEADLINE_S) -> Iterator[None]:
    """A trial that takes longer fails; one that is stuck where no signal reaches it ends the process with a trace."""

    def alarm(*_: Any) -> None:
        raise Hang(f"a trial took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, alarm)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(3 * seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def refused() -> Iterator[list[str]]:
    """What is refused must be refused in one sentence that can be printed -> a list that gets it."""
    said: list[str] = []
    try:
        yield said
    except UserError as err:
        said.append(str(err))
        assert said[0] and "\n" not in said[0] and len(said[0]) < 3000, said[0][:500]
        said[0].encode("utf-8")


class Watch:
    """Whether any file of a folder is opened, by whatever library: the kernel tells (inotify)."""

    OPENED = 0x20

    def __init__(self, folder: Path):
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self.fd >= 0, os.strerror(ctypes.get_errno())
        for place in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
            assert libc.inotify_add_watch(self.fd, os.fsencode(place), self.OPENED) >= 0

    def opened(self) -> list[str]:
        """Names of files that were opened since the last call; folders do not count."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return []
        names = []
        while data:
            _, mask, _, length = struct.unpack_from("iIII", data)
            if not mask & 0x40000000:
                names.append(data[16 : 16 + length].rstrip(b"\0").decode())
            data = data[16 + length :]
        return names

    def close(self) -> None:
        os.close(self.fd)


def replace(file: Path, data: bytes) -> None:
    """Write a file anew; what it was linked to stays as it is."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    file.write_bytes(data)


def damage_bytes(r: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(r.choice((1, 1, 2, 8))):
        at = r.randrange(len(changed) + 1)
        # The first bytes say what the rest means.
        at = min(at, r.choice((8, 64, 1 << 30)))
        kind = r.randrange(7)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << r.randrange(8)
        elif kind == 1:
            changed[at:at] = r.randbytes(r.choice((1, 4, 100)))
        elif kind == 2:
            del changed[at : at + r.choice((1, 8, 1000))]
        elif kind == 3:
            del changed[at:]
        elif kind == 4:
            changed[at : at + 8] = r.choice((b"\0", b"\xff")) * 8
        elif kind == 5:
            changed[at:at] = r.choice(RAW)
        else:
            changed[at:at] = changed[at : at + r.choice((1, 50, 500))]
    return bytes(changed)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield (*path, key)
        yield from _places(below, (*path, key))


def damage_value(r: random.Random, value: Any, extra: tuple[tuple[str, Any], ...] = ()) -> Any:
    """Another value at one place of a JSON document, or one key more or less; `extra` are keys that mean something."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places or r.random() < 0.03:
        return r.choice(VALUES)
    if extra and isinstance(value, dict) and r.random() < 0.25:
        key, given = r.choice(extra)
        value[key] = given
        return value
    path = r.choice(places)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    old, kind = holder[path[-1]], r.randrange(6)
    if kind == 0:
        del holder[path[-1]]
    elif kind == 1 and isinstance(old, int | float) and not isinstance(old, bool):
        holder[path[-1]] = r.choice((-old, old + 1, old - 1, old * 1000, old / 3, str(old), [old], old * 2))
    elif kind == 2 and isinstance(holder, dict):
        holder[r.choice(("", "x", "é", *map(str, holder)))] = holder.pop(path[-1])
    elif kind == 3:
        holder[path[-1]] = r.choice(([old], {"a": old}, [old, old], str(old)))
    else:
        holder[path[-1]] = r.choice(VALUES)
    return value


def write_json(r: random.Random, file: Path, value: Any) -> None:
    """With a raw piece of bytes in place of a value, now and then."""
    data = json.dumps(value).encode()
    if r.random() < 0.1:
        spots = [i for i, byte in enumerate(data) if byte in b":["]
        if spots:
            at = r.choice(spots) + 1
            data = data[:at] + r.choice(RAW) + (b"," if data[at - 1 : at] == b"[" else b',"y":') + data[at:]
    replace(file, data)


def misplace(r: random.Random, file: Path, outside: Path) -> str:
    """Something else where a file was."""
    kind = r.choice(("link", "link to folder", "pipe", "folder", "nothing", "dangling", "loop", "empty", "device"))
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    if kind == "link":
        file.symlink_to(outside / file.name)
    elif kind == "link to folder":
        file.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "dangling":
        file.symlink_to("nowhere")
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "empty":
        file.touch()
    elif kind == "device":
        file.symlink_to("/dev/zero")
    return kind
