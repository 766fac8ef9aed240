"""Speculation as a user meets it: compare, draft train, draft eval, and drafters that do not fit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from paceline.loop import TrainLoop
from paceline.run import Run

from .test_cli import QUICK, here, paceline, rows


def test_compare_says_how_much_faster_and_that_it_is_the_same(tmp_path):
    run = tmp_path / "run"
    done = paceline("compare", "--json", *QUICK, "rollout.max_tokens=120", f"run_dir={run}")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "settings: the recipe" in done.stderr, "what is for people goes elsewhere"
    assert result["responses"] == 16 and result["identical"] + result["near_ties"] == 16
    assert result["rollout_speedup"] > 0 and result["step_speedup"] > 0 and result["accept_length"] > 1.5
    assert result["plain_tok_s"] > 0 and result["adaptive_tok_s"] > 0 and result["steps"] == 4
    assert json.loads((run / "compare.json").read_text()) == result
    picture = (run / "compare.svg").read_text()
    assert picture.startswith("<svg") and "adaptive" in picture and "plain" in picture
    assert all(row["compare/rollout_speedup"] > 0 for row in rows(run))


def test_training_plain_and_adaptive_is_the_same(tmp_path):
    runs, policies = [], []
    for mode in ("plain", "adaptive"):
        run = tmp_path / mode
        assert here("train", *QUICK, "model.dtype=float64", f"run_dir={run}", f"speculation.mode={mode}") == 0
        runs.append(rows(run))
        policies.append(load_file(run / "checkpoints/step-000004/model.safetensors"))
    for a, b in zip(*runs, strict=True):
        for name in ("critic/rewards/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-6, abs=1e-9), name
    assert any(row["actor/grad_norm"] > 0 for row in runs[0])
    assert all(torch.allclose(weight, policies[1][name], atol=1e-8) for name, weight in policies[0].items())
    assert runs[1][-1]["rollout/spec_accept_length"] > 1.5 and runs[0][-1]["rollout/spec_rounds"] == 0
    state = json.loads((tmp_path / "adaptive/checkpoints/step-000004/state.json").read_text())
    assert state["tuner"]["costs"] and state["tuner"]["acceptance"]
    run = Run.open(tmp_path / "adaptive")
    resumed = TrainLoop(run.config, run)
    assert resumed.cluster.transport.worker.rollout.adaptive.tuner.state() == state["tuner"], (
        "as a resumed run knows it too"
    )
    resumed.close()


def test_a_drafter_is_trained_examined_and_used(tmp_path, capsys):
    folder = tmp_path / "drafter"
    words = ["--minutes", "0.05", "--answers", "16", "--window", "32", "--set", "rollout.max_tokens=60"]
    assert here("draft", "train", *words, "--vocab", "60", "--out", folder, "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["steps"] >= 1 and "draft vocabulary: 60 of 104 tokens" in said.err
    assert here("draft", "eval", folder, "--prompts", "2", "--set", "rollout.max_tokens=20", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["temperature"] for row in result["rows"]] == [0.0, 0.6, 1.0]
    assert here("train", *QUICK, f"run_dir={tmp_path / 'run'}", f"speculation.drafter={folder}") == 0
    assert here("draft", "train", *words, "--out", folder) == 2, "nothing is overwritten"


def test_a_block_drafter_is_trained_by_the_command_and_by_a_run(tmp_path, capsys):
    folder = tmp_path / "block"
    words = ["--minutes", "0.05", "--answers", "16", "--window", "32", "--set", "rollout.max_tokens=60"]
    assert here("draft", "train", *words, "--kind", "blocks", "--out", folder) == 2
    assert "--kind is 'blocks', but must be one of: chain, block, parallel" in capsys.readouterr().err
    assert here("draft", "train", *words, "--kind", "block", "--out", folder, "--json") == 0
    run = tmp_path / "run"
    online = ["spot.when=update", "spot.share=0.5", f"speculation.drafter={folder}", "checkpoint.every=0"]
    assert here("train", *QUICK, f"run_dir={run}", *online) == 0
    assert sum(row["drafter/steps"] for row in rows(run)) > 0
    newest = sorted((run / "checkpoints").iterdir())[-1]
    assert json.loads((newest / "drafter" / "config.json").read_text())["paceline"]["block"]["sequential"] is True
    capsys.readouterr()
    assert here("export", run, tmp_path / "out", "--format", "vllm") == 2
    assert "has no drafter whose draft tokens come from one pass" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speculation.drafter=nowhere"], "no drafter at nowhere"),
        (["speculation.strategies=[neural:5x]"], "'neural:5x' is not a strategy"),
        (["speculation.strategies=[oracle:5]"], "needs the drafter 'oracle'"),
    ],
)
def test_what_does_not_work_is_told_plainly(words, message, tmp_path, capsys):
    assert here("train", *QUICK, f"run_dir={tmp_path / 'run'}", *words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_drafter_of_another_model_is_refused(tmp_path, capsys):
    from paceline.draft.eagle.files import save_drafter
    from paceline.draft.eagle.model import DrafterShape, EagleModel

    from .conftest import tiny_model

    save_drafter(EagleModel(tiny_model(), DrafterShape(64, 32)).init_weights(), tmp_path / "other")
    words = [f"run_dir={tmp_path / 'run'}", f"speculation.drafter={tmp_path / 'other'}"]
    assert here("train", *QUICK, *words) == 2
    assert "hidden_size 48, but the policy has 192" in capsys.readouterr().err


def test_comparing_plain_with_plain_is_refused(capsys):
    assert here("compare", "speculation.mode=plain") == 2
    assert "nothing to compare" in capsys.readouterr().err
