"""Workers as actors of a Ray cluster, on one machine or many. An actor runs the same loop as a local process does, in a
thread of its own; calls and reports pass through two queues that its methods fill and empty. The driver itself only
ever waits for answers, with a deadline; everything else is asked of Ray by a thread (`ray_thread.py`).
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cluster.coordinator import Lost, Report
from paceline.cluster.deadline import within
from paceline.cluster.messages import Call, Failed, WorkerSpec
from paceline.cluster.ray_cluster import choose_ray_device, connect, import_ray, parse_address
from paceline.cluster.ray_placement import Placement
from paceline.cluster.ray_thread import ANSWER_S, RayThread
from paceline.cluster.ray_worker import Actor
from paceline.process.sweeper import Sweeper

if TYPE_CHECKING:
    from paceline.config import Config

__all__ = ["RayActors", "choose_ray_device"]

CLOSE_S = 10.0  # seconds for Ray to let go
END_S = 2.0  # seconds for actors to end by themselves


@dataclass
class _Remote:
    """The present generation of a worker."""

    spec: WorkerSpec
    actor: Any = None
    """Of the former generation, until the new one is created."""
    where: Any = None
    """Host and process, as a reference that Ray resolves."""
    sent: int = 0
    """Calls so far."""


class RayActors:
    actor: type = Actor
    """What runs on the other side."""

    def __init__(self, config: Config, log: Path | None = None):
        """What workers print goes to Ray's own logs."""
        ray = import_ray()
        self._config = config
        self._ray = ray
        self._own = not ray.is_initialized()
        if self._own:
            self._sweeper = Sweeper()
            try:
                with self._sweeper.marking():  # a cluster that this starts; one that was there has no mark
                    connect(ray, config.cluster.address)
            except BaseException:
                self._sweeper.close()
                raise
        # A cluster of this machine alone needs no address that others see.
        alone = self._own and not config.cluster.address and not os.environ.get("RAY_ADDRESS")
        self.host = "127.0.0.1" if alone else ray.util.get_node_ip_address()
        self.cores = int(ray.cluster_resources().get("CPU", 1))
        self._workers: dict[int, _Remote] = {}
        self._asked: dict[Any, tuple[int, int]] = {}  # open questions -> worker and generation
        self._lost: set[tuple[int, int]] = set()  # worker and generation, reported or about to be
        self._losses: list[Report] = []  # not reported yet
        self._lock = threading.Lock()  # for all of the above
        try:
            device = choose_ray_device(config)
            gpus = 1 / config.cluster.workers_per_gpu if device == "cuda" else 0
            self._placement = Placement(ray, config.cluster.workers, gpus)
        except BaseException:
            self._leave()
            raise
        self.devices = [device] * config.cluster.workers
        self.core_sets: list[tuple[int, ...]] = [()] * config.cluster.workers
        head = parse_address(ray.get_runtime_context().gcs_address)
        self._thread = RayThread(head, str(config.run_dir))

    # The driver's side

    def start(self, spec: WorkerSpec) -> None:
        with self._lock:
            before = self._workers.get(spec.number)
            self._workers[spec.number] = _Remote(spec, before.actor if before else None)
        self._thread.do(lambda: self._create(spec))

    def send(self, workers: Sequence[int], call: Call) -> None:
        for worker in workers:
            with self._lock:
                remote = self._workers[worker]
                number = remote.sent
                remote.sent += 1
            self._thread.do(partial(self._call, remote, number, call))

    def receive(self, seconds: float) -> list[Report]:
        end = time.monotonic() + seconds
        while True:
            self._thread.check()
            out = self._take_lost() or self._take_answers(min(max(end - time.monotonic(), 0), 0.2))
            if out or time.monotonic() >= end:
                return out

    def kill(self, worker: int) -> None:
        """It is lost from now on, whether or not Ray can still reach it."""
        with self._lock:
            generation = self._workers[worker].spec.generation
        self._lose(worker, generation)

    def pid(self, worker: int) -> int:
        """On its own host."""
        return int(self._where_is(worker)[2])

    def hosts(self) -> dict[int, str]:
        """Where each worker is: the name of its host, and the address."""
        found = {}
        for worker in sorted(self._workers):
            try:
                name, address, _ = self._where_is(worker)
            except (self._ray.exceptions.RayError, TimeoutError):  # lost meanwhile, which `receive` says
                continue
            found[worker] = f"{name} ({address})"
        return found

    def close(self) -> None:
        self._thread.close()
        with self._lock:
            actors = [remote.actor for remote in self._workers.values() if remote.actor is not None]
            for remote in self._workers.values():
                remote.actor = None
            self._asked.clear()
        if self._thread.failed is None:
            self._try(lambda: [self._ray.kill(actor) for actor in actors])
            self._try(self._placement.remove)
        else:  # only its head can kill; Ray prints a warning for each that ends by itself
            self._try(lambda: self._end(actors))
        self._leave()

    # What the thread does

    def _create(self, spec: WorkerSpec) -> None:
        if (spec.number, spec.generation) in self._lost:
            return
        before = self._workers[spec.number].actor
        if before is not None:
            self._ray.kill(before)
        options = self._placement.options(spec.number, again=before is not None)
        make = self._ray.remote(max_concurrency=4, **options)(self.actor)
        actor = make.remote(self._config, spec)
        with self._lock:
            remote = self._workers[spec.number]  # of a later generation perhaps, which then ends this actor
            remote.actor = actor
            remote.where = actor.where.remote()
            self._asked[actor.reports.remote()] = (spec.number, spec.generation)

    def _call(self, remote: _Remote, number: int, call: Call) -> None:
        actor = remote.actor
        if self._workers[remote.spec.number] is remote and actor is not None:
            actor.call.remote(number, call)

    # Listening

    def _take_lost(self) -> list[Report]:
        with self._lock:
            out, self._losses = self._losses, []
        return out

    def _take_answers(self, seconds: float) -> list[Report]:
        with self._lock:
            questions = list(self._asked)
        if not questions:
            time.sleep(seconds)
            return []
        answered, _ = self._ray.wait(questions, num_returns=len(questions), timeout=0)
        if not answered and seconds:
            answered, _ = self._ray.wait(questions, num_returns=1, timeout=seconds)
        return [report for question in answered for report in self._answer(question)]

    def _answer(self, question: Any) -> list[Report]:
        errors = self._ray.exceptions
        with self._lock:
            if question not in self._asked:  # given up meanwhile
                return []
            worker, generation = self._asked[question]
        try:
            reports: list[Report] = self._ray.get(question, timeout=ANSWER_S)
        except errors.GetTimeoutError:  # it is there, but does not come: asked for again, until the worker is given up
            return []
        except errors.RayError as err:
            if isinstance(err, errors.RayActorError) and "creation task" not in str(err):
                self._lose(worker, generation)
                return self._take_lost()
            with self._lock:  # an error, not a death: the same would happen again
                self._forget(worker, generation)
            text = re.sub(r"\x1b\[\d+m", "", str(err)).strip()  # without Ray's colours
            return [Failed(worker, generation, None, "starting", "error", text.splitlines()[-1], text)]
        with self._lock:
            del self._asked[question]
            self._asked[self._workers[worker].actor.reports.remote()] = (worker, generation)
        return reports

    def _lose(self, worker: int, generation: int) -> None:
        """Reported once, by the next `receive`."""
        with self._lock:
            if (worker, generation) in self._lost:
                return
            self._lost.add((worker, generation))
            self._losses.append(Lost(worker, generation))
            self._forget(worker, generation)
            actor = self._workers[worker].actor
        if actor is not None:
            self._thread.do(lambda: self._ray.kill(actor))

    def _forget(self, worker: int, generation: int) -> None:
        self._asked = {question: who for question, who in self._asked.items() if who != (worker, generation)}

    def _where_is(self, worker: int) -> tuple[str, str, int]:
        end = time.monotonic() + ANSWER_S
        while self._workers[worker].where is None and time.monotonic() < end:
            time.sleep(0.01)
        where = self._workers[worker].where
        if where is None:
            raise TimeoutError(f"worker {worker} has not been started within {ANSWER_S:.0f} s")
        return self._ray.get(where, timeout=max(end - time.monotonic(), 0.1))

    # The end

    def _try(self, work: Callable[[], object]) -> None:
        """For what would be good, but is not worth waiting for."""
        try:
            within(CLOSE_S / 2, work)
        except (TimeoutError, self._ray.exceptions.RayError, RuntimeError, ValueError):
            return

    def _end(self, actors: list[Any]) -> None:
        """Needs nothing but connections: those that have one end, though Ray may be gone."""
        if actors:
            self._ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=END_S)

    def _leave(self) -> None:
        if not self._own:
            return
        try:
            within(CLOSE_S, self._ray.shutdown)
        except TimeoutError:  # its head is gone; it would be tried again when the process ends
            atexit.unregister(self._ray.shutdown)
        self._sweeper.close()
