"""`paceline eval`: of a model, of a run's checkpoints, against others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.evaluation.records import read_records
from paceline.loop import train
from paceline.run.best import read_best

from ..cluster.runs import SMALL
from ..test_cli import here
from ..tied import make_tied
from .test_during_run import EVAL

QUICK = ["--prompts", "4", "--samples", "2", "--max-tokens", "24", "--set", "model.threads=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "evaluated"
    words = [*SMALL, *EVAL, "steps=2", "eval.every=1", "checkpoint.every=1", "speculation.mode=plain"]
    train(load_config(None, [*words, f"run_dir={folder}"]))
    return folder


def evaluate(capsys, *words) -> dict:
    assert here("eval", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_checkpoints_of_a_run_give_the_numbers_of_the_run(run, capsys):
    """Also with two workers, and the model that the run began with as step 0."""
    said = evaluate(capsys, run, "--against", "1", "--against", "0", "--set", "cluster.workers=2")
    assert [m["model"] for m in said["models"]] == ["step 2", "step 1", "step 0"]
    records = {r.step: r for r in read_records(run)}
    for model in said["models"]:
        record = records[model["step"]]
        assert model["fingerprint"] == record.fingerprint
        assert [p["rewards"] for p in model["prompts"]] == [p.rewards for p in record.scores.prompts]
    (mean,) = [d for d in said["differences"]["step 0"] if d["name"] == "mean"]
    assert mean["difference"] == pytest.approx(records[2].scores.value("mean") - records[0].scores.value("mean"))
    assert mean["interval_low"] <= mean["difference"] <= mean["interval_high"]


def test_newest_best_and_by_folder(run, capsys):
    best = evaluate(capsys, run, "--checkpoint", "best", *QUICK)["models"][0]
    assert best["step"] == read_best(run).step
    named = evaluate(capsys, run / "checkpoints" / "step-000001", *QUICK)["models"][0]
    assert named["model"] == "step 1" and len(named["prompts"]) == 4
    assert evaluate(capsys, run, *QUICK)["models"][0]["model"] == "step 2"


def test_two_models_as_a_table(tmp_path, capsys):
    models = [make_tied(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 1))]
    (tmp_path / "data.jsonl").write_text('{"prompt": "12"}\n{"prompt": "7"}\n{"prompt": "1+1"}\n')
    (tmp_path / "mine.py").write_text("def f(completions, **_): return [len(c) / 10 for c in completions]\n")
    words = ["--task", tmp_path / "data.jsonl", "--max-tokens", "20", "--samples", "4", "--out", tmp_path / "out.json"]
    words += ["--set", f"reward.functions=[{{function: '{tmp_path / 'mine.py'}:f'}}]", "--set", "model.dtype=float64"]
    words += ["--set", "model.threads=1"]
    assert here("eval", models[0], "--against", models[1], *words) == 0
    said = capsys.readouterr().out
    assert "on equal dice" in said and "95 % interval" in said and "pass@4" in said
    kept = json.loads((tmp_path / "out.json").read_text())
    first, second = kept["models"]
    assert first["fingerprint"] == second["fingerprint"] and first["prompts"] != second["prompts"]
    assert "val-core/data/reward/best@4/mean" in first["metrics"]


def test_another_tokenizer_gets_the_same_prompts_and_other_dice(run, tmp_path, capsys):
    tied = make_tied(tmp_path / "tied")
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    assert here("eval", run, "--against", tied, *QUICK, "--task", data) == 0
    assert "on the same prompts, but not equal dice" in capsys.readouterr().out
    data.write_text('{"prompt": "1+1="}\n{"prompt": "' + "1" * 600 + '"}\n')
    assert here("eval", run, "--against", tied, *QUICK, "--task", data) == 2
    assert "do not have room for the same prompts" in capsys.readouterr().err


BAD = {
    "no task": (["embedded"], "name a task with --task"),
    "not a run": (["embedded", "--task", "countdown", "--checkpoint", "3"], "embedded is not a run"),
    "no such step": (["{run}", "--checkpoint", "7"], "has no checkpoint of step 7; there are: 1, 2"),
    "no number": (["{run}", "--checkpoint", "last"], "give newest, best, or the number of a step"),
    "twice the same": (["{run}", "--against", "2"], "name the same model more than once"),
    "no model": (["nowhere", "--task", "countdown"], "no model folder at nowhere"),
    "bad setting": (["{run}", "--set", "eval.sampels=1"], "did you mean 'eval.samples'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_words_are_one_sentence(case, run, capsys):
    words, problem = BAD[case]
    assert here("eval", *(w.replace("{run}", str(run)) for w in words)) == 2
    said = capsys.readouterr().err
    assert problem in said and said.count("\n") == 1, said
