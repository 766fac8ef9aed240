"""Large messages both ways at once, and a worker that has stopped: the driver waits for nobody."""

from __future__ import annotations

import os
import signal
import time

import pytest

from paceline.cluster.messages import Call, Returned

from .runs import make, run
from .test_errors import FAULTS

BIG = b"m" * 2**23
TIMEOUT = 8.0
DEADLINE = 120.0  # seconds: turns a hang into a failure


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.soak)])
def trainer(request, tmp_path, monkeypatch):
    if request.param == "ray":
        pytest.importorskip("ray")
    path = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("PACELINE_FAULT", "none:round:0:error")  # only for the call that says back what it is told
    monkeypatch.setenv("PACELINE_FAULT_MARK", str(tmp_path / "mark"))
    words = ["cluster.workers=2", f"cluster.backend={request.param}", "speculation.mode=plain", "steps=10"]
    trainer = make(tmp_path / "run", *words, f"cluster.timeout_s={TIMEOUT}")
    yield trainer
    trainer.close()


def echo(trainer, worker: int, numbers: range) -> None:
    for number in numbers:
        trainer.cluster.transport.send([worker], Call("echo", (BIG,), number))


def test_many_megabytes_both_ways_at_once(trainer):
    numbers = range(1000, 1012)
    for worker in (0, 1):
        echo(trainer, worker, numbers)
    back = {0: 0, 1: 0}
    end = time.monotonic() + DEADLINE
    while min(back.values()) < len(numbers):
        assert time.monotonic() < end, back
        for report in trainer.cluster.transport.receive(0.1):
            if isinstance(report, Returned):
                assert report.value == BIG
                back[report.worker] += 1


def test_a_stopped_worker_that_is_sent_megabytes_is_lost(trainer, tmp_path, capsys):
    trainer.step()
    pid = trainer.cluster.transport.pid(1)
    echo(trainer, 1, range(1000, 1008))  # it is busy writing these, and
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    echo(trainer, 1, range(1008, 1016))  # nobody reads those
    took = []
    note = trainer.cluster.liveness.note
    trainer.cluster.liveness.note = lambda text: (took.append(time.monotonic() - stopped), note(text))
    trainer.step()
    with capsys.disabled():
        print(f"\nlost after {took[0]:.1f} s, cluster.timeout_s = {TIMEOUT:g}")
    assert 1 in trainer.cluster.lost
    answers, _ = run(tmp_path / "undisturbed", 2, "speculation.mode=plain", "steps=10")
    assert trainer.answers == answers
