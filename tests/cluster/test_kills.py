"""Workers are killed and hang at any moment: nothing is lost, nothing is counted twice, nothing changes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core import Request
from paceline.observe.timeline import read_timeline
from paceline.process.guard import descendants

from ..processes import gone
from .runs import SMALL, Recorded, make, policy, run, same_policy

PHASES = ("rollout", "training", "update")
WORDS = [
    "cluster.workers=3", "cluster.restarts=1000", "speculation.strategies=[neural:5, suffix:6]", "steps=1000",
]  # fmt: skip
"""Idle workers train. That they are killed while they write ahead is for `test_ahead.py`."""


class Killer:
    """Strikes one worker at a time, in each phase in turn, at a random moment of it; the next one only when all are
    there again, because two at once may take the state of the run with them."""

    def __init__(self, trainer: Recorded, strike: Callable[[int], None], seed: int):
        self.trainer, self.strike, self.dice = trainer, strike, random.Random(seed)
        self.struck: list[tuple[str, int]] = []
        self.phase = ""
        self._watch_phases()

    def _watch_phases(self) -> None:
        cluster = self.trainer.cluster
        for phase, name in (("rollout", "_carry_out"), ("update", "update"), ("after", "merge_drafters")):
            work = getattr(cluster, name)
            setattr(cluster, name, self._wrapped(phase, work))

    def _wrapped(self, phase: str, work: Callable) -> Callable:
        def call(*args, **more):
            spare = phase == "rollout" and type(args[0]).__name__ in ("Train", "WriteAhead")
            self.phase = "training" if spare else phase
            return work(*args, **more)

        return call

    def run(self, count: int) -> None:
        cluster = self.trainer.cluster
        while len(self.struck) < count:
            wanted = PHASES[len(self.struck) % len(PHASES)]
            if len(cluster.workers) == 3 and cluster.liveness.living == set(cluster.workers) and self.phase == wanted:
                time.sleep(self.dice.uniform(0, 0.3 if wanted != "training" else 0.05))
                worker = self.dice.choice(cluster.workers)
                self.strike(worker)
                self.struck.append((self.phase, worker))
                self._wait_until(lambda: len(cluster.lost) >= len(self.struck))
            time.sleep(0.002)

    @staticmethod
    def _wait_until(happened: Callable[[], bool]) -> None:
        while not happened():
            time.sleep(0.01)


def steps_under_fire(trainer: Recorded, killer: Killer, kills: int) -> int:
    """Step until so many were struck, and once more -> how many steps were made."""
    thread = threading.Thread(target=killer.run, args=(kills,), daemon=True)
    thread.start()
    steps = 0
    while thread.is_alive():
        trainer.step()
        steps += 1
    trainer.step()
    return steps + 1


def check(trainer: Recorded, killer: Killer, kills: int, folder: Path, *words: str) -> None:
    """`words` are settings that the undisturbed run has too."""
    try:
        steps = steps_under_fire(trainer, killer, kills)
        learned = policy(trainer)
    finally:
        trainer.close()
    assert len(trainer.cluster.lost) == len(killer.struck) == kills
    answers, undisturbed = run(folder / "undisturbed", steps, "speculation.mode=plain", "steps=1000", *words)
    assert trainer.answers == answers
    assert same_policy(learned, undisturbed)


def kill(trainer: Recorded) -> Callable[[int], None]:
    return lambda worker: os.kill(trainer.cluster.transport.pid(worker), signal.SIGKILL)


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.soak)])
def test_killed_at_random_moments(tmp_path, kills):
    trainer = make(tmp_path / "run", *WORDS)
    check(trainer, Killer(trainer, kill(trainer), kills), kills, tmp_path)
    spans = read_timeline(tmp_path / "run" / "timeline.json")
    assert {span.worker for span in spans} == {0, 1, 2}


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_actors_of_ray_killed_at_random_moments(tmp_path, kills):
    pytest.importorskip("ray")
    trainer = make(tmp_path / "run", *WORDS, "cluster.backend=ray")
    check(trainer, Killer(trainer, kill(trainer), kills), kills, tmp_path)


def test_one_that_hangs_is_given_up(tmp_path):
    trainer = make(tmp_path / "run", *WORDS, "cluster.timeout_s=8")
    notes: list[str] = []
    trainer.cluster.liveness.note = notes.append
    stop = lambda worker: os.kill(trainer.cluster.transport.pid(worker), signal.SIGSTOP)  # noqa: E731
    check(trainer, Killer(trainer, stop, 1), 1, tmp_path)
    assert any("has said nothing" in note for note in notes)


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_a_checkpoint_is_whole_after_a_loss(tmp_path, moment):
    """One is lost in a rollout that is given up, or while all write their parts: what it held is saved by another."""
    trainer = make(tmp_path / "run", "cluster.workers=2", "cluster.restarts=0", "speculation.mode=plain", "steps=2")
    cluster = trainer.cluster
    strike = lambda: os.kill(cluster.transport.pid(0), signal.SIGKILL)  # noqa: E731
    try:
        trainer.step()
        if moment == "before":
            for n, _ in enumerate(trainer._answers([_a_request(trainer)], {0: 9.0})):
                if n == 0:
                    strike()
                if cluster.lost:
                    cluster.clear()
                    break
        else:
            strike()
        trainer.saver.save()
        assert cluster.lost == [0] and cluster.workers == (1,)
    finally:
        trainer.close()
    second = Recorded(trainer.config, trainer.run)  # with both again
    try:
        second.step()
        answers, learned = [*trainer.answers, *second.answers], policy(second)
    finally:
        second.close()
    undisturbed = run(tmp_path / "undisturbed", 2, "speculation.mode=plain", "steps=2")
    assert answers == undisturbed[0] and same_policy(learned, undisturbed[1])


def _a_request(trainer: Recorded) -> Request:
    """One that takes a while."""
    sampling = replace(trainer.prompts.sampling, max_tokens=400, min_tokens=400)
    return Request(0, trainer.prompts.group(0).prompt, sampling, 0)


def test_the_metrics_say_who_was_lost(tmp_path):
    trainer = make(tmp_path / "run", *WORDS[:1], "steps=3", "speculation.mode=plain")
    struck = []
    carry_out = trainer.cluster._carry_out

    def strike(order, requests):
        carry_out(order, requests)
        if trainer.progress.step == 1 and not struck:
            struck.append(order.worker)
            os.kill(trainer.cluster.transport.pid(order.worker), signal.SIGKILL)

    trainer.cluster._carry_out = strike
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["cluster/lost"] for row in rows] == [0, 1, 0]


def test_workers_end_with_their_driver(tmp_path):
    words = [*SMALL, "steps=1000", "cluster.workers=2", f"run_dir={tmp_path / 'run'}"]
    driver = subprocess.Popen([sys.executable, "-m", "paceline", "train", *words], stdout=subprocess.DEVNULL)
    try:
        while not (tmp_path / "run" / "metrics.jsonl").exists():  # all of them are at work
            time.sleep(0.1)
        children = descendants(driver.pid)
        assert len(children) == 4, "two workers, one process for rewards and its guardian"
    finally:
        driver.kill()
        driver.wait()
    assert gone(children), "a process was left"
