"""Errors of reward functions: a sentence with file and line once per step, the traceback in rewards.log."""

from __future__ import annotations

import json
import textwrap

import pytest

from paceline.observe.metrics import read_lines
from paceline.tasks.reward_errors import FULL_TRACES, RewardErrors

from ..test_cli import QUICK, here

REWARD = textwrap.dedent("""\
    import json

    def helper(text):
        return json.loads(text)["score"]

    def f(completions, **columns):
        if sum(map(ord, completions[0])) % 2:
            raise KeyError("colour")
        return [helper(completions[0])]
""")
RAISED = {"KeyError": 8, "JSONDecodeError": 4}
"""Line of the user's file, not of the library that raised."""


@pytest.mark.parametrize("workers", [0, 1])
def test_each_kind_is_told_once_per_step_and_logged_in_full(tmp_path, capsys, workers):
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(REWARD)
    words = [
        f"reward.functions=[{{function: {file}:f, per: completion}}]",
        "reward.on_error=value",
        "reward.error_value=-1",
    ]
    words += [f"reward.workers={workers}", f"run_dir={run}", "rollout.samples=12", "steps=2"]
    assert here("train", *QUICK, *words) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note ")]
    assert len(notes) == 4, "two kinds in two steps, of 48 answers"
    for name, line in RAISED.items():
        told = [note for note in notes if f"raised {name}: " in note]
        assert len(told) == 2 and all(f"(at {file}:{line})" in note and "counted as -1" in note for note in told)
        assert all("more of this step" in note for note in told)
    assert sum(str(run / "rewards.log") in note for note in notes) == 2
    log = (run / "rewards.log").read_text()
    assert log.count("Traceback") == 2 * FULL_TRACES and f'File "{file}", line 8, in f' in log
    assert log.count("the reward ") == 48, "every answer is named"
    assert [row["reward/errors"] for row in read_lines(run / "metrics.jsonl")] == [1.0, 1.0]


def test_one_that_stops_the_run_is_logged_too(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "Make 6 from 1 2 3.\n"}))
    words = [f"reward.functions=[{{function: {tmp_path}/mine.py:f, per: completion}}]", f"run_dir={tmp_path / 'run'}"]
    assert here("train", *QUICK, *words, f"task.name={tmp_path / 'd.jsonl'}") == 1
    said = capsys.readouterr().err
    assert f"(at {tmp_path}/mine.py:" in said and f"line 1 of {tmp_path}/d.jsonl" in said and said.count("\n") == 1
    assert "Traceback" in (tmp_path / "run" / "rewards.log").read_text()


def test_a_run_that_only_fails_says_little(tmp_path):
    errors = RewardErrors(tmp_path / "rewards.log")
    for kind in range(5):
        for i in range(kind + 1):
            errors.add(f"kind {kind}", f"the reward f raised E{kind}", "trace\n" * 10**6, f"sample {i}")
    told = errors.told(0.0)
    assert told[0].startswith("the reward f raised E4 on sample 0; counted as 0, like 4 more of this step (traceback")
    assert len(told) == 4 and told[3].startswith("2 more kinds") and errors.told(0.0) == []
    assert (tmp_path / "rewards.log").stat().st_size < 500_000
