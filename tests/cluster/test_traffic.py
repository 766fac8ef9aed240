"""What the driver sends for an update: the tokens of a trajectory go to the worker that computes its gradient, once."""

from __future__ import annotations

import os
import signal
from collections import Counter

from paceline.cluster.messages import Call
from paceline.core import Trajectory
from paceline.process.channel import to_bytes

from .runs import Recorded, make, policy, run, same_policy

WORDS = ["cluster.workers=2", "speculation.mode=plain", "steps=2", "rollout.max_tokens=60"]
FACTS = 64  # bytes per trajectory of what all workers are sent, and of indices
CALLS = 2000  # bytes of the messages themselves: names, numbers, and empty arguments


class Traffic:
    """All that is sent while the policy is updated."""

    def __init__(self, trainer: Recorded):
        self.trainer = trainer
        self.bytes = 0
        self.sent: Counter[tuple[int, int]] = Counter()
        """How often each worker was sent each trajectory."""
        self.trajectories: list[Trajectory] = []
        self._send = trainer.cluster.transport.send
        self._update = trainer.cluster.update
        trainer.cluster.update = self._recorded_update

    def _recorded_update(self, trajectories: list[Trajectory], step: int) -> dict[str, float]:
        self.trajectories = trajectories
        self.trainer.cluster.transport.send = self.send
        try:
            return self._update(trajectories, step)
        finally:
            self.trainer.cluster.transport.send = self._send

    def send(self, workers, call: Call) -> None:
        number = {id(trajectory): i for i, trajectory in enumerate(self.trajectories)}
        self.bytes += len(to_bytes(call)) * len(workers)
        for worker in workers:
            self.sent.update((worker, number[id(t)]) for t in found(call.args))
        self._send(workers, call)

    @property
    def whole(self) -> int:
        """Bytes of all trajectories."""
        return len(to_bytes(self.trajectories))

    def receivers(self) -> dict[int, int]:
        """Trajectory -> how many messages had it."""
        counts: Counter[int] = Counter()
        for (_, i), times in self.sent.items():
            counts[i] += times
        return dict(counts)


def found(args: object) -> list[Trajectory]:
    """All trajectories in the arguments of a call."""
    if isinstance(args, Trajectory):
        return [args]
    if isinstance(args, dict):
        args = list(args.values())
    return [t for arg in args for t in found(arg)] if isinstance(args, list | tuple) else []


def one_step(folder, *words: str) -> Traffic:
    trainer = make(folder, *WORDS, *words)
    try:
        traffic = Traffic(trainer)
        trainer.step()
        return traffic
    finally:
        trainer.close()


def test_each_trajectory_goes_to_one_worker_once(tmp_path):
    traffic = one_step(tmp_path / "run")
    assert traffic.receivers() == dict.fromkeys(range(8), 1)
    assert {worker for worker, _ in traffic.sent} == {0, 1}, "both have a share"
    assert traffic.bytes < traffic.whole + 2 * FACTS * 8 + CALLS, (traffic.bytes, traffic.whole)


def test_scores_do_not_go_where_they_come_from(tmp_path):
    traffic = one_step(tmp_path / "run", "learn.algorithm=grpo", "learn.kl_coef=0.05")
    assert traffic.receivers() == dict.fromkeys(range(8), 1)
    assert traffic.bytes < traffic.whole + 2 * FACTS * 8 + CALLS, (traffic.bytes, traffic.whole)


def test_no_worker_is_sent_a_trajectory_twice(tmp_path):
    traffic = one_step(tmp_path / "run", "learn.epochs=3", "learn.minibatches=2")
    assert set(traffic.sent.values()) == {1} and traffic.receivers().keys() == set(range(8))


def test_who_is_left_gets_what_it_lacks(tmp_path):
    """A worker is lost while gradients are computed: the other one is sent the rest of the trajectories, once."""
    trainer = make(tmp_path / "run", *WORDS, "cluster.restarts=0")
    try:
        traffic = Traffic(trainer)
        send = traffic.send

        def strike(workers, call):
            send(workers, call)
            if call.name == "gradients" and 1 in workers and not trainer.cluster.lost:
                os.kill(trainer.cluster.transport.pid(1), signal.SIGKILL)

        traffic.send = strike
        trainer.step()
        assert trainer.cluster.lost == [1]
        assert {i for worker, i in traffic.sent if worker == 0} == set(range(8)) and set(traffic.sent.values()) == {1}
        learned = policy(trainer)
    finally:
        trainer.close()
    assert same_policy(learned, run(tmp_path / "alone", 1, *WORDS[1:])[1])
