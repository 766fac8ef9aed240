"""Kill -9 at any moment, then --resume: the run goes on, and its numbers are those of a run that was never killed."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from .digits import DIGITS

WORDS = [
    "steps=40", "rollout.prompts=2", "rollout.samples=4", "rollout.max_tokens=24", "checkpoint.every=3",
    "log.tensorboard=false", "model.threads=1", "learn.lr=1e-4", "learn.algorithm=grpo", "task.difficulty=easy", DIGITS,
    # Strategies are chosen by the clock, and a pass over eight tokens rounds unlike a pass over one.
    "speculation.mode=plain",
    "cluster.workers=1",
]  # fmt: skip
SAME = ("critic/rewards/mean", "actor/pg_loss", "response_length/mean", "actor/grad_norm")


class Undisturbed(NamedTuple):
    rows: dict[int, dict]
    seconds: float
    """That all of it took, on this machine."""


def start(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "paceline", "train", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err


def read(run: Path) -> dict[int, dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)), "no step is logged twice"
    return {line["step"]: line for line in lines}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Undisturbed:
    run, started = tmp_path_factory.mktemp("undisturbed") / "run", time.monotonic()
    finish(start(*WORDS, f"run_dir={run}"))
    rows, seconds = read(run), time.monotonic() - started
    assert all(row["actor/grad_norm"] > 0 for row in rows.values()), "a step without a signal would hide what is lost"
    return Undisturbed(rows, seconds)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_killed_at_random_moments(undisturbed, tmp_path, kills):
    dice, done = random.Random(kills), 0
    runs = (tmp_path / f"run-{number}" for number in itertools.count())
    while done < kills:
        run = next(runs)
        done += run_and_kill(run, kills - done, lambda: dice.uniform(0, undisturbed.seconds))
        after = read(run)
        assert after.keys() == undisturbed.rows.keys()
        for step, row in after.items():
            for name in SAME:
                assert row[name] == pytest.approx(undisturbed.rows[step][name], abs=1e-5), (step, name)


def run_and_kill(run: Path, most: int, moment: Callable[[], float]) -> int:
    """A whole run that is killed whenever it takes longer than `moment` -> how often it was."""
    process, done = start(*WORDS, f"run_dir={run}"), 0
    while done < most:
        while not (run / "config.yaml").exists():  # before that there is nothing to resume
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        try:
            process.wait(moment())
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            done += 1
        process = start("--resume", str(run))
    finish(process)
    return done


def test_killed_between_a_checkpoint_and_its_line_in_the_log(undisturbed, tmp_path):
    run = tmp_path / "run"
    die = "MetricsLog.write = lambda self, step, metrics: step == 6 and os._exit(9) or write(self, step, metrics)"
    code = (
        f"import os, sys; from paceline.observe.metrics import MetricsLog; write = MetricsLog.write; {die}; "
        "from paceline.cli import main; main()"
    )
    words = [*WORDS[1:], "steps=8", f"run_dir={run}"]
    killed = subprocess.run([sys.executable, "-c", code, "train", *words], capture_output=True, text=True)
    assert killed.returncode == 9, killed.stderr
    assert (run / "checkpoints" / "step-000006").is_dir() and 6 not in read(run)
    finish(start("--resume", str(run)))
    for step, row in read(run).items():
        assert [row[name] for name in SAME] == [undisturbed.rows[step][name] for name in SAME]
    assert set(read(run)) == set(range(1, 9))
