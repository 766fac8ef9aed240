"""Rewards that hang, die, fork, flood or lie: the limit fires, the setting decides, and no process is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paceline.core import Sample
from paceline.errors import UserError
from paceline.process.guard import descendants
from paceline.tasks.reward_pool import RewardPool

from ..processes import gone
from ..test_cli import QUICK, here

SAMPLE = Sample(3, "2+2?", {"answer": "4"})
DEADLINE = 120.0  # seconds: turns a hang into a failure
FILE = textwrap.dedent("""
    import ctypes, os, signal, time

    def sleeps(completions, **columns):
        while completions[0].startswith("bad"):
            time.sleep(60)
        return [1.0]

    def sleeps_with_the_lock(completions, **columns):  # no thread of Python's runs meanwhile
        if completions[0].startswith("bad"):
            ctypes.PyDLL(None).sleep(600)
        return [1.0]

    def raises(completions, **columns):
        if completions[0].startswith("bad"):
            raise ValueError("x" * 10_000_000)
        return [1.0]

    def nan(completions, **columns):
        return [float("nan" if completions[0].startswith("bad") else "1")]

    def floods(completions, **columns):
        return ["y" * 10_000_000 if completions[0].startswith("bad") else 1.0]

    class Unspeakable(Exception):
        def __str__(self):
            raise RuntimeError("not even that")

    def unspeakable(completions, **columns):
        if completions[0].startswith("bad"):
            raise Unspeakable
        return [1.0]

    def forks(completions, **columns):
        if completions[0].startswith("bad") and os.fork() == 0:
            pass  # and the copy goes on as if it were the original
        return [1.0]

    def daemons(completions, **columns):
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        return [1.0]

    def killed(completions, **columns):
        if completions[0].startswith("bad"):
            os.kill(os.getpid(), signal.SIGKILL)
        return [1.0]

    def killed_once(completions, **columns):
        mark = os.environ["MARK"]
        if completions[0].startswith("bad") and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return [1.0]

    def exits(completions, **columns):
        if completions[0].startswith("bad"):
            os._exit(0)
        return [1.0]

    def closes(completions, **columns):
        if completions[0].startswith("bad"):
            os.closerange(3, 1000)
        return [1.0]

    def length(completions, **columns):
        return [float(len(completions[0]))]
""")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FILE)
    return path


def results(name, texts, **settings):
    pool = RewardPool([(name, 1.0)], **settings)
    try:
        pool.ready()
        for request_id, text in enumerate(texts):
            pool.submit(request_id, SAMPLE, text, [1] * (len(text) // 4))
        out = {}
        end = time.monotonic() + DEADLINE
        while pool.open:
            assert time.monotonic() < end, "a result never came"
            for result in pool.collect(block=True):
                assert result.request_id not in out, "an answer was rewarded twice"
                out[result.request_id] = result
        pids = [process.child.pid for process in pool._processes]
        pids += [pid for process in pids for pid in descendants(process)]
    finally:
        pool.close()
    assert gone(pids)
    return [out[request_id] for request_id in range(len(texts))]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sleeps", "took longer than 3 s"),
        ("sleeps_with_the_lock", "took longer than 3 s"),
        ("raises", "raised ValueError: xxx"),
        ("nan", "returned nan"),
        ("floods", "which is not a number"),
        ("unspeakable", "raised Unspeakable"),
        ("forks", None),
        ("daemons", None),
        ("killed", "twice on the same answer: it was killed by signal 9 (SIGKILL)"),
        ("exits", "exited with code 0"),
        ("closes", ""),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_one_bad_answer_costs_one_answer(file, name, problem, workers):
    got = results(f"{file}:{name}", ["ok", "bad", "ok", "ok"], timeout_s=3, workers=workers)
    assert [v.error is None for v in got] == [True, problem is None, True, True]
    if problem is not None:
        assert f"{file}:{name}" in got[1].error and problem in got[1].error
        assert len(got[1].error) < 1000 and "\n" not in got[1].error


def test_one_that_was_killed_from_outside_is_asked_again(file, tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(tmp_path / "killed"))
    got = results(f"{file}:killed_once", ["ok", "bad", "ok"], timeout_s=60)
    assert (tmp_path / "killed").exists() and [v.error for v in got] == [None, None, None]


@pytest.mark.parametrize("name", ["sleeps", "length"])
def test_answers_of_a_megabyte(file, name):
    """More than any pipe takes, for one that reads nothing and for one that does."""
    texts = ["bad" + "x" * 2**20, *(f"{i}" + "y" * 2**20 for i in range(12))]
    got = results(f"{file}:{name}", texts, timeout_s=3 if name == "sleeps" else 60)
    if name == "length":
        assert [v.values[f"{file}:length"] for v in got] == [len(text) for text in texts]
    else:
        assert [v.error is None for v in got] == [False] + [True] * 12


def test_one_that_dies_again_and_again_stops_the_run(file):
    pool = RewardPool([(f"{file}:length", 1.0)], timeout_s=60)
    try:
        pool.ready()
        with pytest.raises(UserError, match="times in a row"):
            for _ in range(10):
                pool._processes[0].child.process.kill()
                pool._processes[0].child.process.wait()
                while pool._processes[0].child.process.poll() is not None:
                    pool.collect(block=True)
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("import time; time.sleep(600)", "took longer than 4 s (reward.start_timeout_s)"),
        ("import ctypes; ctypes.PyDLL(None).sleep(600)", "took longer than 4 s (reward.start_timeout_s)"),
        ("import os; os._exit(7)", "exited with code 7 while it was importing"),
        ("raise ValueError('z' * 10_000_000)", "cannot be imported: ValueError: zzz"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
    ],
)
def test_an_import_that_never_ends_or_fails(tmp_path, capsys, body, problem):
    (tmp_path / "mine.py").write_text(f"{body}\ndef f(completions, **columns):\n    return [1.0]\n")
    functions = f"reward.functions=[{{function: {tmp_path}/mine.py:f}}]"
    words = [*QUICK, f"run_dir={tmp_path / 'run'}", functions, "reward.start_timeout_s=4"]
    assert here("train", *words) == 2
    error = capsys.readouterr().err.strip()
    assert problem in error and "\n" not in error and len(error) < 1000


REWARD = textwrap.dedent("""
    import os, time

    def f(completions, **columns):
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        if os.path.exists(os.path.join(os.path.dirname(__file__), "hang")):
            time.sleep(600)
        return [float(len(text) % 3) for text in completions]
""")


@pytest.mark.parametrize("moments", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_nothing_is_left_of_a_trainer_that_was_killed(tmp_path, moments):
    """At any moment: while functions are imported, while they run, while one hangs, with what they have forked."""
    dice = random.Random(moments)
    (tmp_path / "mine.py").write_text(REWARD)
    for moment in range(moments):
        functions = f"reward.functions=[{{function: {tmp_path}/mine.py:f}}]"
        words = [*QUICK, f"run_dir={tmp_path / f'run-{moment}'}", functions, "steps=1000", "reward.workers=2"]
        if moment % 3 == 2:
            (tmp_path / "hang").touch()
        trainer = subprocess.Popen(
            [sys.executable, "-m", "paceline", "train", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            end = time.monotonic() + DEADLINE
            while len(descendants(trainer.pid)) < 4 + 2 * (moment > 0) and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(dice.uniform(0, 1))
            below = descendants(trainer.pid)
            assert below
        finally:
            os.kill(trainer.pid, signal.SIGKILL)
            trainer.wait()
        assert gone(below), [Path(f"/proc/{pid}/cmdline").read_text() for pid in below if Path(f"/proc/{pid}").exists()]


HANGS_ONCE = textwrap.dedent("""
    import os, time

    def f(completions, **columns):
        mark = os.path.join(os.path.dirname(__file__), "mark")
        if not os.path.exists(mark):
            open(mark, "w").close()
            time.sleep(600)
        return [1.0] * len(completions)
""")


@pytest.mark.parametrize(("setting", "code"), [("stop", 1), ("value", 0)])
def test_the_setting_decides_what_becomes_of_the_run(tmp_path, capsys, setting, code):
    (tmp_path / "mine.py").write_text(HANGS_ONCE)
    functions = f"reward.functions=[{{function: {tmp_path}/mine.py:f}}]"
    run = tmp_path / "run"
    words = [*QUICK, f"run_dir={run}", functions, f"reward.on_error={setting}", "reward.timeout_s=0.25", "steps=1"]
    assert here("train", *words, "rollout.prompts=1", "rollout.samples=4") == code
    output = capsys.readouterr()
    assert (run / "checkpoints").is_dir() and any((run / "checkpoints").iterdir()), "saved"
    if code:
        assert "took longer than 1 s for 4 completions" in output.err and "\n" not in output.err.strip()
    else:
        assert "took longer than 1 s" in output.out
