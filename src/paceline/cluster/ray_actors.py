"""Workers as actors of a Ray cluster, on one machine or many. An actor runs the same loop as a local process does, in a
thread of its own; calls and reports pass through two queues that its methods fill and empty."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from typing import Any

from paceline.cluster.coordinator import Lost, Report
from paceline.cluster.messages import Call, Post
from paceline.config import Config
from paceline.errors import UserError

PATIENCE = 10.0  # seconds for which an actor holds on to a question when it has nothing to say


def _ray() -> Any:
    try:
        import ray
    except ImportError as err:
        raise UserError("cluster.backend=ray needs Ray: pip install 'paceline[ray]'") from err
    return ray


class Actor:
    """What runs on the other side."""

    def __init__(self, config: Config, post: Post):
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._early: dict[int, Call] = {}
        self._next, self._order = 0, threading.Lock()
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(config, post), daemon=True)
        self._thread.start()

    def _serve(self, config: Config, post: Post) -> None:
        from paceline.cluster.serve import serve

        serve(config, post, self._next_call, self._reports.put)

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

    def pid(self) -> int:
        import os

        return os.getpid()


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes before it gives up."""
    host, _, port = address.removeprefix("ray://").partition(":")
    if not port.isdigit():  # "auto", or a name that only Ray understands
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as err:
        raise UserError(f"no Ray cluster can be reached at {address} ({err}); see cluster.address") from err


class RayActors:
    def __init__(self, config: Config):
        ray, c = _ray(), config.cluster
        self._config, self._ray = config, ray
        self._own = not ray.is_initialized()
        if self._own:
            if c.address:
                _check_reachable(c.address)
            try:
                ray.init(
                    address=c.address,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=True,
                    logging_level=logging.ERROR,
                )
            except (ConnectionError, RuntimeError, ValueError, OSError) as err:
                where = f"at {c.address}" if c.address else "on this machine"
                first = str(err).strip().partition("\n")[0]
                raise UserError(f"no Ray cluster can be reached {where} ({first}); see cluster.address") from err
        self.host = ray.util.get_node_ip_address()
        self.cores = int(ray.cluster_resources().get("CPU", 1))
        self._gpus = 1 / c.workers_per_gpu if choose_ray_device(config) == "cuda" else 0
        self._actors: dict[int, Any] = {}
        self._posts: dict[int, Post] = {}
        self._sent: dict[int, int] = {}  # calls to the present life of each
        self._asked: dict[Any, int] = {}  # open questions -> worker

    def start(self, post: Post) -> None:
        if post.number in self._actors:
            self._ray.kill(self._actors[post.number])
        make = self._ray.remote(num_cpus=0, num_gpus=self._gpus, max_concurrency=4, scheduling_strategy="SPREAD")(Actor)
        self._actors[post.number] = make.remote(self._config, post)
        self._posts[post.number], self._sent[post.number] = post, 0
        self._ask(post.number)

    def _ask(self, worker: int) -> None:
        self._asked[self._actors[worker].reports.remote()] = worker

    def send(self, worker: int, call: Call) -> None:
        self._actors[worker].call.remote(self._sent[worker], call)
        self._sent[worker] += 1

    def receive(self, seconds: float) -> list[Report]:
        if not self._asked:
            return []
        ray = self._ray
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        if not answered and seconds:
            answered, _ = ray.wait(list(self._asked), num_returns=1, timeout=seconds)
        out: list[Report] = []
        for question in answered:
            worker = self._asked.pop(question)
            try:
                out += ray.get(question)
            except ray.exceptions.RayActorError:
                out.append(Lost(worker, self._posts[worker].life))
            else:
                self._ask(worker)
        return out

    def kill(self, worker: int) -> None:
        self._ray.kill(self._actors[worker])

    def pid(self, worker: int) -> int:
        return int(self._ray.get(self._actors[worker].pid.remote()))

    def close(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._asked.clear()
        if self._own:
            self._ray.shutdown()


def choose_ray_device(config: Config) -> str:
    """cpu or cuda, the same for all workers; says so if the cluster has too few GPUs."""
    c, wanted = config.cluster, config.model.device
    gpus = int(_ray().cluster_resources().get("GPU", 0))
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return "cpu"
    if c.workers > gpus * c.workers_per_gpu:
        raise UserError(
            f"cluster.workers={c.workers}, but the Ray cluster has {gpus} GPU{'s' if gpus != 1 else ''} for "
            f"{c.workers_per_gpu} each: lower it, set cluster.workers_per_gpu, or model.device=cpu"
        )
    return "cuda"
