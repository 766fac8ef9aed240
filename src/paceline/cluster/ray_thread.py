"""Asking Ray without waiting for it: Ray may keep a caller waiting without end, when its head is gone for example. So a
thread asks, one thing after the other, and another one watches the head; the driver only looks whether they failed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from paceline.cluster.addresses import Address, why_unreachable
from paceline.cluster.ray_cluster import first_line
from paceline.errors import RunError, UserError

ANSWER_S = 10.0  # seconds for what Ray has at hand already
GONE_S = 15.0  # seconds without an answer after which the head of the cluster is gone; Ray itself ends the driver at 60


class RayThread:
    def __init__(self, head: Address, run_dir: str):
        """`head` is where the cluster's head listens."""
        self._head = head
        self._run_dir = run_dir
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._closed = threading.Event()
        self.failed: Exception | None = None
        threading.Thread(target=self._do_work, daemon=True).start()
        threading.Thread(target=self._watch_head, daemon=True).start()

    def do(self, work: Callable[[], object]) -> None:
        """After all that was given before."""
        self._work.put(work)

    def close(self) -> None:
        """Nothing more will be asked."""
        self._closed.set()
        self._work.put(None)

    def check(self) -> None:
        """Raise what went wrong in the meantime."""
        since = self._busy_since
        if self.failed is None and since is not None and time.monotonic() - since > GONE_S + ANSWER_S:
            self.failed = self._gone("Ray on this machine does not answer")
        if self.failed is None:
            return
        if isinstance(self.failed, (RunError, UserError)):
            raise self.failed
        raise self._gone(first_line(self.failed)) from self.failed

    def _do_work(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            self._busy_since = time.monotonic()
            try:
                work()
            except Exception as err:  # noqa: BLE001 (raised by `check`)
                self.failed = self.failed or err
                return
            finally:
                self._busy_since = None

    def _watch_head(self) -> None:
        """Ray's own way to notice that its head is gone is to end the process, without a word of ours."""
        seen = time.monotonic()
        while not self._closed.wait(1.0):
            if why_unreachable(self._head, 2.0) is None:
                seen = time.monotonic()
            elif time.monotonic() - seen > GONE_S:
                self.failed = self._gone(f"its head has not answered for {GONE_S:.0f} s")
                return

    def _gone(self, why: str) -> RunError:
        return RunError(
            f"the Ray cluster at {self._head[0]}:{self._head[1]} is gone ({why}); go on from the last checkpoint with: "
            f"paceline train --resume {self._run_dir}"
        )
