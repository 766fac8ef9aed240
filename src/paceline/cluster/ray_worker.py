"""The other side of a Ray actor: the loop of a worker in a thread, and methods that fill and empty its two queues."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import traceback
from typing import TYPE_CHECKING

from paceline.cluster.messages import Call, Failed, WorkerSpec

if TYPE_CHECKING:
    from paceline.cluster.coordinator import Report
    from paceline.config import Config

PATIENCE = 10.0  # seconds for which an actor holds on to a question when it has nothing to say
ORPHAN_S = 2.0  # seconds between looks for the parent


class Actor:
    def __init__(self, config: Config, spec: WorkerSpec):
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._early: dict[int, Call] = {}
        self._next = 0
        self._order = threading.Lock()
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        self._thread = threading.Thread(target=self._serve, args=(config, spec), daemon=True)
        self._thread.start()

    def _serve(self, config: Config, spec: WorkerSpec) -> None:
        try:
            from paceline.cluster.serve import serve

            serve(config, spec, self._next_call, self._reports.put)
        except BaseException as err:  # noqa: BLE001 (reported to the driver, which ends the run)
            sentence = f"{type(err).__name__}: {err}"
            self._reports.put(
                Failed(spec.number, spec.generation, None, "serving", "error", sentence, traceback.format_exc())
            )

    def _next_call(self, block: bool) -> Call | None:
        try:
            return self._calls.get(block)
        except queue.Empty:
            return None

    def call(self, number: int, call: Call) -> None:
        """An actor whose methods run side by side may get them in any order, so they are put back into theirs."""
        with self._order:
            self._early[number] = call
            while self._next in self._early:
                self._calls.put(self._early.pop(self._next))
                self._next += 1

    def reports(self) -> list[Report]:
        """What has been said since the last time; waits a while for something."""
        out: list[Report] = []
        try:
            out.append(self._reports.get(timeout=PATIENCE))
            while True:
                out.append(self._reports.get_nowait())
        except queue.Empty:
            return out

    def where(self) -> tuple[str, str, int]:
        """Name and address of the host, and the process."""
        import ray

        return socket.gethostname(), ray.util.get_node_ip_address(), os.getpid()

    def end(self) -> None:
        """Without Ray, whose head may be gone."""
        os._exit(0)


def _end_with(parent: int) -> None:
    """Ray's process on this host starts its actors, and does not always take them along."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_S)
    os._exit(1)
