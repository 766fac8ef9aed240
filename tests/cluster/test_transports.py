"""A transport is a class in a file and a line in the registry: `cluster.backend` takes its name."""

from __future__ import annotations

import pytest

from paceline.cluster.in_process import InProcess
from paceline.cluster.transport import TRANSPORTS
from paceline.errors import UserError

from .runs import make, policy, run, same_policy


class Counting(InProcess):
    """Knows which calls were made."""

    def __init__(self, config, log):
        super().__init__(config, log)
        self.calls = []

    def send(self, workers, call):
        self.calls.append(call.name)
        super().send(workers, call)


def test_a_new_transport_trains(tmp_path, monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "counting", f"{__name__}:Counting")
    trainer = make(tmp_path / "run", "cluster.backend=counting", "speculation.mode=plain", "steps=1")
    try:
        trainer.step()
        assert {"begin", "assign", "end", "prepare_update", "gradients", "apply"} <= set(
            trainer.cluster.transport.calls
        )
        answers, learned = trainer.answers, policy(trainer)
    finally:
        trainer.close()
    expected = run(tmp_path / "local", 1, "speculation.mode=plain", "steps=1")
    assert answers == expected[0] and same_policy(learned, expected[1])


def test_one_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"cluster\.backend=pigeons is unknown; there are: in_process, local, ray"):
        make(tmp_path / "run", "cluster.backend=pigeons", "steps=1")


def test_one_process_has_one_worker(tmp_path):
    with pytest.raises(UserError, match=r"set cluster\.workers=1, or cluster\.backend=local"):
        make(tmp_path / "run", "cluster.backend=in_process", "cluster.workers=2", "steps=1")
