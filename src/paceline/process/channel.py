"""Messages between two processes of ours: whole Python objects by value, over one socket.

A thread reads, so that neither side ever waits to hear something; at the parent a thread writes too, so that it never
waits for a child that is stopped, or is writing megabytes itself. Queues are bounded, and what comes says when it came.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

QUEUED = 4096  # messages that may wait to be written: far more than a healthy child is ever behind
MAX_BYTES = 2**31 - 1  # of one message


class Full(Exception):
    """The other side has not read for so long that no more can be queued."""


class Channel:
    """One end, which hears. `deliver(message, when)` is called by the reading thread for everything that comes,
    `ended(reason)` once, when nothing can come any more."""

    def __init__(
        self,
        end: socket.socket,
        deliver: Callable[[Any, float], None],
        ended: Callable[[str], None],
        limit: int = MAX_BYTES,
    ):
        self._socket = end
        self._pipe = Connection(os.dup(end.fileno()))  # each closes its own
        self._deliver = deliver
        self._ended = ended
        self._limit = limit
        self._sending = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True, name="paceline-read")
        self._reader.start()

    def send(self, message: object) -> None:
        """Write it now, waiting for the other side to read."""
        data = to_bytes(message)
        with self._sending:
            self._pipe.send_bytes(data)

    def _read(self) -> None:
        reason = "closed its connection"
        try:
            while True:
                data = self._pipe.recv_bytes(self._limit)
                self._deliver(pickle.loads(data), time.monotonic())
        except EOFError:
            pass
        except OSError as err:
            reason = f"broke its connection ({err.strerror or err})"
        except Exception as err:  # noqa: BLE001 (unpickling what is damaged raises anything; it ends the child, by name)
            reason = f"sent something that cannot be read ({type(err).__name__}: {err})"
        self._ended(reason)

    def close(self) -> None:
        """Wake the threads, wherever they wait, and let go of the socket."""
        with contextlib.suppress(OSError):  # the other side may have closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(5.0)
        self._socket.close()
        self._pipe.close()


class QueuedChannel(Channel):
    """One whose `send` never waits."""

    def _start(self) -> None:
        super()._start()
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUED)
        self._writer = threading.Thread(target=self._write, daemon=True, name="paceline-write")
        self._writer.start()

    def send(self, message: object) -> None:
        """Queue it. Pickled here, so that what cannot be sent is said to whoever sends it."""
        try:
            self._queue.put_nowait(to_bytes(message))
        except queue.Full as err:
            raise Full from err

    def _write(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                self._pipe.send_bytes(data)
            except OSError:  # the reader hears of it too
                return

    def close(self) -> None:
        with contextlib.suppress(queue.Full):  # then the writer is in the middle of something, which is about to fail
            self._queue.put_nowait(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._writer.join(5.0)
        super().close()


def to_bytes(message: object) -> bytes:
    """By value: `Connection.send` would hand over tensors as shared memory, which dies with its owner."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
