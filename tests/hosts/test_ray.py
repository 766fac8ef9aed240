"""What Ray may do to a driver: no message, worker or cluster keeps it waiting, and errors are told from deaths."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from paceline.cluster import ray_placement
from paceline.cluster.coordinator import Lost, Report
from paceline.cluster.messages import Call, Failed, Returned, WorkerSpec
from paceline.cluster.ray_actors import RayActors
from paceline.cluster.ray_cluster import choose_ray_device, connect
from paceline.cluster.ray_worker import Actor
from paceline.config import load_config
from paceline.errors import UserError

from .hosts import wait_for

ray = pytest.importorskip("ray")

LARGE = 8_000_000  # bytes
PATIENCE = 120.0  # seconds after which something hangs


class Echo(Actor):
    """Sends back what it gets."""

    def _serve(self, config, spec):
        while True:
            call = self._next_call(True)
            self._reports.put(Returned(spec.number, spec.generation, call.number, call.args[0]))


class Stillborn(Actor):
    def __init__(self, config, spec):
        raise ImportError("no module named torch on this host")


class Confused(Actor):
    def _next_call(self, block):
        raise KeyError("nobody foresaw this")

    def _serve(self, config, spec):
        from paceline.cluster import serve

        serve.Worker = lambda *args: Idle()
        super()._serve(config, spec)


class Idle:
    busy = False

    def ready(self):
        return Report(0, 1)


@pytest.fixture(scope="module")
def cluster():
    import tests.hosts.test_ray as here

    ray.cloudpickle.register_pickle_by_value(here)  # actors need not find the tests
    ray.init(num_cpus=2, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(here)


@pytest.fixture
def transport(cluster):
    made: list[RayActors] = []

    def make(actor: type, workers: int = 2) -> RayActors:
        kind = type("Transport", (RayActors,), {"actor": actor})
        made.append(kind(load_config(None, [f"cluster.workers={workers}", "cluster.backend=ray", "model.device=cpu"])))
        return made[-1]

    yield make
    for one in made:
        one.close()


def spec(worker: int, generation: int = 1) -> WorkerSpec:
    return WorkerSpec(worker, generation, 2, source="", state=None, device="cpu")


def hear(transport: RayActors, count: int) -> list[Report]:
    """So many reports."""
    out: list[Report] = []
    end = time.monotonic() + PATIENCE
    while len(out) < count:
        assert time.monotonic() < end, f"{len(out)} of {count} reports"
        out += transport.receive(0.5)
    return out


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_large_messages_both_ways_past_a_stopped_actor(transport):
    """More than the object store holds. The one that is stopped is lost as soon as it is given up."""
    actors = transport(Echo)
    for worker in (0, 1):
        actors.start(spec(worker))
        actors.send([worker], Call("echo", (b"hello",), 0))
    assert {(r.worker, r.value) for r in hear(actors, 2)} == {(0, b"hello"), (1, b"hello")}
    assert set(actors.hosts()) == {0, 1}
    pid = actors.pid(1)
    os.kill(pid, signal.SIGSTOP)
    large = os.urandom(LARGE)
    for number in range(1, 21):
        for worker in (0, 1):
            actors.send([worker], Call("echo", (large,), number))
    answers = hear(actors, 20)
    assert [(r.worker, r.call) for r in answers] == [(0, number) for number in range(1, 21)]
    assert all(r.value == large for r in answers)
    actors.kill(1)
    assert actors.receive(0.0) == [Lost(1, 1)], "it does not depend on Ray"
    actors.kill(1)
    assert actors.receive(0.0) == [], "it is lost once"
    wait_for(lambda: gone(pid), 60, "Ray has not ended it")
    actors.start(spec(1, generation=2))
    actors.send([1], Call("echo", (large,), 7))
    assert hear(actors, 1) == [Returned(1, 2, 7, large)]


def test_a_death_is_told(transport):
    actors = transport(Echo)
    actors.start(spec(0))
    os.kill(actors.pid(0), signal.SIGKILL)
    assert hear(actors, 1) == [Lost(0, 1)]


@pytest.mark.parametrize(("actor", "words"), [(Stillborn, "no module named torch"), (Confused, "nobody foresaw this")])
def test_an_error_is_not_a_death(transport, actor, words):
    actors = transport(actor)
    actors.start(spec(0))
    reports = hear(actors, 1)
    reports += [] if isinstance(reports[-1], Failed) else hear(actors, 1)
    failed = reports[-1]
    assert isinstance(failed, Failed) and failed.kind == "error"
    assert words in failed.error and "\n" not in failed.error
    assert words in failed.trace and ", line " in failed.trace and "\x1b" not in failed.trace
    assert not any(isinstance(report, Failed) for report in actors.receive(1.0)), "it is reported once"


@pytest.mark.soak
def test_more_workers_than_cpus(transport):
    """They share: a CPU is asked for only so that they are spread."""
    actors = transport(Echo, workers=6)
    for worker in range(6):
        actors.start(spec(worker))
        actors.send([worker], Call("echo", (worker,), 0))
    assert sorted(r.value for r in hear(actors, 6)) == list(range(6))


def test_a_cluster_without_room_says_what_it_has(transport, monkeypatch):
    monkeypatch.setattr(ray_placement, "READY_S", 1.0)
    other = ray.util.placement_group([{"CPU": 2}])
    try:
        assert other.wait(30)
        with pytest.raises(
            UserError, match=r"no room for 2 workers with 1 CPU each .* it has 2 at [\d.]+ \(CPU; 0 free"
        ):
            transport(Echo)
    finally:
        ray.util.remove_placement_group(other)


def test_too_few_gpus(cluster):
    with pytest.raises(UserError, match="the Ray cluster has 0 GPUs for 1 each"):
        choose_ray_device(load_config(None, ["cluster.workers=2", "model.device=cuda"]))


def test_something_else_answers_at_the_address(monkeypatch):
    """It accepts connections and says nothing: Ray itself would wait."""
    from paceline.cluster import ray_cluster

    monkeypatch.setattr(ray_cluster, "INIT_S", 3.0)

    class Slow:
        exceptions = ray.exceptions

        @staticmethod
        def init(**_):
            threading.Event().wait(PATIENCE)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match=f"no Ray cluster can be reached at {address} .not done within 3 s"):
            connect(Slow, address)


def test_a_token_that_is_missing():
    class Closed:
        exceptions = ray.exceptions

        @staticmethod
        def init(**_):
            raise RuntimeError("Failed to connect to GCS. Last connection error: InvalidAuthToken: missing")

    with pytest.raises(UserError, match="asks for a token that this machine does not show: set RAY_AUTH_MODE=token"):
        connect(Closed, "auto")
