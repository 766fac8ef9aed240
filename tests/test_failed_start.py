"""A run that cannot start leaves nothing behind, wherever it fails, but for the traceback of what nobody expected."""

from __future__ import annotations

import sys
import types

import pytest

from .test_cli import QUICK, here


def raise_late(*_: object, **__: object) -> None:
    raise ConnectionError("no account\nand more")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["task.difficulty=silly"], "'silly' is none of"),
        (["log.wandb=project"], "log.wandb is set, but wandb could not start: no account"),
        (["log.wandb=project", "log.tensorboard=true"], "log.wandb is set, but wandb could not start: no account"),
        (["task.max_prompt_tokens=3"], "have more than 3 tokens"),
        (["cluster.workers=2", "rollout.kv_memory_gb=0.000001"], "raise rollout.kv_memory_gb"),
    ],
)
@pytest.mark.parametrize("place", ["fresh", "named", "nested", "there already"])
def test_what_is_wrong_with_settings(words, problem, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=raise_late))
    folder = {"fresh": [], "named": ["run_dir=run"], "nested": ["run_dir=a/b/run"], "there already": ["run_dir=mine"]}
    if place == "there already":
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("keep me")
    before = sorted(tmp_path.rglob("*"))
    quick = [word for word in QUICK if not word.startswith("run_dir")]
    assert here("train", *quick, *words, *folder[place]) == 2
    assert problem in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_what_nobody_expected_leaves_its_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.setup.start.make_cluster", raise_late)
    assert here("train", *QUICK, "run_dir=a/run") == 1
    said = capsys.readouterr().err
    assert "could not be started: ConnectionError: no account" in said and "a/run.errors.log" in said
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "run.errors.log"]
    assert "Traceback" in (tmp_path / "a" / "run.errors.log").read_text()


def test_a_folder_of_runs_that_others_use_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "other").mkdir(parents=True)
    assert here("train", *[word for word in QUICK if not word.startswith("run_dir")], "task.difficulty=silly") == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "other"]
