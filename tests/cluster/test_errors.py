"""An error in a worker is not a death: the run is saved and stops with one sentence, and goes on when it is fixed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from paceline.run import Run

from .runs import SMALL

FAULTS = Path(__file__).parent / "faults"
WORDS = [*SMALL, "steps=3", "rollout.max_tokens=60", "spot.max_interval=1", "spot.merge_share=1", "learn.lr=1e-4"]
SAME = ("critic/rewards/mean", "actor/pg_loss", "response_length/mean", "actor/grad_norm")
SHORT = [(1, "gradients"), (2, "training")]
LONG = [
    *product((1, 2, 3), ("assign", "round", "training", "gradients", "apply", "save", "merge")),
    (2, "ahead"),
    (3, "ahead"),
]


def train(*words: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "paceline", "train", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )


def rows(run: Path) -> dict[int, dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "every step once"
    return {line["step"]: line for line in lines}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, dict]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    done = train(*WORDS, f"run_dir={run}", "speculation.mode=plain")
    assert done.returncode == 0, done.stderr
    return rows(run)


def check(tmp_path, undisturbed, workers: int, what: str, kind: str = "error", backend: str = "local") -> None:
    run, mark = tmp_path / "run", tmp_path / "mark"
    spot = "tail" if workers > 1 else "update"
    if what == "training" and workers == 1:
        what = "spend"
    call = {"round": 3, "save": 1, "ahead": 1}.get(what, 2)
    words = [*WORDS, f"run_dir={run}", f"cluster.workers={workers}", f"spot.when={spot}", f"cluster.backend={backend}"]
    words.append(f"rollout.write_ahead={str(what == 'ahead').lower()}")  # otherwise idle workers train
    worker = "any" if what in ("training", "ahead") else workers - 1  # whoever runs dry first
    fault = {"PACELINE_FAULT": f"{worker}:{what}:{call}:{kind}", "PACELINE_FAULT_MARK": str(mark)}
    done = train(*words, **fault)
    assert mark.exists(), "the fault was never met"
    assert done.returncode == 1, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    sentence = done.stderr.strip()
    assert sentence.startswith("paceline: ") and "\n" not in sentence and "planted" in sentence, sentence
    assert "Traceback" not in done.stdout + done.stderr and f"paceline train --resume {run}" in sentence
    if kind == "error":
        assert "errors.log" in sentence
        log = (run / "errors.log").read_text()
        assert "Traceback" in log and "ValueError: planted fault" in log and "sitecustomize" in log
    if what == "apply":  # the policy is half updated: what was there before is what counts
        assert "checkpoint" in sentence
    else:
        assert "the run is saved after step" in sentence and Run.open(run).newest_checkpoint() is not None
    again = train("--resume", str(run))
    assert again.returncode == 0, again.stderr
    after = rows(run)
    assert after.keys() == undisturbed.keys()
    for step, row in after.items():
        for name in SAME:
            assert row[name] == pytest.approx(undisturbed[step][name], abs=1e-6), (step, name)


@pytest.mark.parametrize(("workers", "what"), SHORT)
def test_an_error_stops_the_run_saved(tmp_path, undisturbed, workers, what):
    check(tmp_path, undisturbed, workers, what)


@pytest.mark.soak
@pytest.mark.parametrize(("workers", "what"), LONG)
def test_an_error_anywhere(tmp_path, undisturbed, workers, what):
    check(tmp_path, undisturbed, workers, what)


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_what_the_user_has_to_fix_stops_it_too(tmp_path, undisturbed, workers):
    check(tmp_path, undisturbed, workers, "round", kind="user")


@pytest.mark.soak
@pytest.mark.parametrize("what", ["round", "gradients"])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_an_actor(tmp_path, undisturbed, workers, what):
    pytest.importorskip("ray")
    check(tmp_path, undisturbed, workers, what, backend="ray")
