"""One writer for the files of a run: whole files appear at once or not at all, lines are appended, and nothing is
written through a link, which may lead anywhere."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

ASIDE = re.compile(r"\.aside-[0-9a-f]{16}")
"""Names of files that are not whole yet; a kill leaves one behind."""


def write_aside(file: Path, data: str | bytes | Iterable[bytes]) -> None:
    """Write a file aside, under a name that nobody can have taken, and rename it into place."""
    aside = file.with_name(f".aside-{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as out:
            if isinstance(data, str):
                out.write(data.encode("utf-8"))
            elif isinstance(data, bytes):
                out.write(data)
            else:
                out.writelines(data)
        aside.replace(file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def append_text(file: Path, text: str) -> None:
    """Append to an ordinary file, which is made if there is none."""
    descriptor = open_to_append(file)
    with os.fdopen(descriptor, "ab") as out:
        out.write(text.encode("utf-8"))


def open_to_append(file: Path) -> int:
    """A file descriptor; a link, a pipe or a folder in the file's place is an `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(file, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{file} is not an ordinary file")
    return descriptor


def remove_unfinished(folder: Path) -> None:
    """What a kill has left of files that were being written aside."""
    for file in folder.iterdir():
        if ASIDE.fullmatch(file.name) and not file.is_symlink() and file.is_file():
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
