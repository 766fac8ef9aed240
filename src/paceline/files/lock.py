"""One process at a time works on a run directory.

The lock is the kernel's own (flock) on a file in the directory. Whoever holds it loses it by ending, however that comes
about, so no lock is ever left behind; the file itself stays and means nothing. It says who has or had the lock last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import weakref
from pathlib import Path

from paceline.errors import UserError
from paceline.files.reading import shorten

LOCK = ".lock"
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""What disks without locks answer."""
OWNER_BYTES = 200  # of the lock file that are read: the process that has it
TRIES = 10  # the file may be removed with its directory, by one that gave up, between opening and locking it

_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """Held from when it is made until `release`, or the end of the process."""

    def __init__(self, folder: Path):
        """The folder must exist."""
        self.warning: str | None = None
        """Set where the disk has no locks: then nothing is held."""
        self._descriptor: int | None = None
        for _ in range(TRIES):
            self._descriptor = self._take(folder)
            if self._is_current(folder):
                break
            self.release()
        else:
            raise UserError(f"{folder} is removed and made again all the time; find out by whom")
        _held.add(self)

    def _take(self, folder: Path) -> int:
        file = folder / LOCK
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(file, flags, 0o666)
        except OSError as err:
            raise UserError(f"the run directory {folder} cannot be written: {err.strerror} ({file})") from err
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UserError(f"{file} is not an ordinary file; remove it")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            who = _read(descriptor) or "another process"
            os.close(descriptor)
            raise UserError(
                f"{folder} is in use by {who}, and a run takes one process at a time; wait for it to end, or stop it"
            ) from err
        except OSError as err:
            if err.errno not in NO_LOCKS:
                os.close(descriptor)
                raise UserError(f"the run directory {folder} cannot be locked: {err.strerror} ({file})") from err
            self.warning = (
                f"the disk of {folder} has no locks ({err.strerror}), so nothing keeps a second process from working "
                "on the same run: take care that there is none"
            )
        except BaseException:
            os.close(descriptor)
            raise
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return descriptor

    def _is_current(self, folder: Path) -> bool:
        """Whether it is still the directory's file that is locked."""
        assert self._descriptor is not None
        try:
            there = os.stat(folder / LOCK, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def release(self) -> None:
        if self._descriptor is not None:
            descriptor = self._descriptor
            self._descriptor = None
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.release()


def _read(descriptor: int) -> str:
    try:
        return shorten(os.pread(descriptor, OWNER_BYTES, 0).decode("utf-8", "replace").strip())
    except OSError:
        return ""


def _in_forked_child() -> None:
    """A fork without exec (multiprocessing in a user's function) would keep the lock alive after its parent's end."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_in_forked_child)
