"""Every example runs, small, and does what it says."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from paceline.observe.metrics import read_lines

from .tied import make_tied

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch, capsys):
    """Runs one in this process: importing torch anew for each takes longer than what they do."""

    def run(name: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_all_of_them_are_tested():
    text = Path(__file__).read_text()
    assert all(f'"{path.name}"' in text for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


def test_generate(example):
    out = example("generate.py", "--tokens", 60)
    assert out.count("log p -") == 4 and "accept length" in out
    assert example("generate.py", "--tokens", 60).splitlines()[:-1] == out.splitlines()[:-1], "the same seed"


def test_custom_reward(example, tmp_path):
    run = tmp_path / "run"
    out = example("custom_reward.py", "--steps", 1, "--prompts", 4, "--tokens", 64, "--run", run)
    assert "mean reward: first" in out
    (row,) = read_lines(run / "metrics.jsonl")
    assert 1.0 < row["critic/rewards/max"] < 1.2, "right, and brief"


def test_group_reward(example, tmp_path):
    run = tmp_path / "run"
    out = example("group_reward.py", "--steps", 1, "--prompts", 4, "--tokens", 64, "--run", run)
    assert "right answers in a group of 6" in out
    (row,) = read_lines(run / "metrics.jsonl")
    assert 0 <= row["group/right"] <= 6 and row["critic/rewards/max"] > 1.1, "the shortest right one of several"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert all("place" in sample["extra"] for sample in samples)


def test_judge_reward(example, tmp_path, monkeypatch):
    for name in ("JUDGE_URL", "JUDGE_MODEL"):
        monkeypatch.setenv(name, "")  # put back what the example sets
        monkeypatch.delenv(name)
    run = tmp_path / "run"
    out = example("judge_reward.py", "--serve", "--steps", 2, "--tokens", 48, "--run", run)
    asked = int(out.partition("the judge was asked ")[2].split()[0])
    assert asked > 32, "once for each answer, and again for those that failed"
    rows = read_lines(run / "metrics.jsonl")
    assert all(row["judge/graded"] == 1.0 and 0 < row["critic/rewards/mean"] <= 1 for row in rows)


def test_own_dataset(example, tmp_path):
    run = tmp_path / "run"
    assert "2 steps" in example("own_dataset.py", "--steps", 2, "--prompts", 2, "--run", run)
    before = read_lines(run / "metrics.jsonl")
    assert before[0]["critic/rewards/mean"] > 0
    shutil.rmtree(run / "checkpoints" / "step-000002")  # as if it had been killed after the first step
    example("own_dataset.py", "--resume", "--run", run)
    after = read_lines(run / "metrics.jsonl")
    assert [row["critic/rewards/mean"] for row in after] == [row["critic/rewards/mean"] for row in before]


def test_gsm8k(example, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert "sums:socratic" in example("gsm8k.py", "--make", tmp_path / "sums")
    model = make_tied(tmp_path / "model")
    words = ("--model", model, "--steps", 1, "--prompts", 2, "--tokens", 24)
    for kind, shots in (("main", 0), ("socratic", 1)):
        run = tmp_path / kind
        data = ("--data", f"{tmp_path}/sums:{kind}", "--run", run)
        assert "1 steps" in example("gsm8k.py", *words, *data, "--shots", shots)
        sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
        roles = [message["role"] for message in sample["prompt"]]
        assert roles == ["user", "assistant"] * shots + ["user"]
        assert sample["prompt"][-1]["content"].endswith("give the number behind ####.")
        assert ("How many clips" in sample["prompt"][1]["content"]) if shots else True
        assert "reward/math" in read_lines(run / "metrics.jsonl")[0]


def test_own_model(example, tmp_path):
    out = example("own_model.py", "--steps", 10, "--run", tmp_path / "run")
    line = next(line for line in out.splitlines() if line.startswith("mean reward"))
    first, last = (float(part.split()[-1]) for part in line.split(","))
    assert last > first + 0.2, "it learns"
    assert (tmp_path / "run" / "checkpoints" / "step-000010" / "model.safetensors").is_file()


def test_lora(example, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    out = example("lora.py", "--steps", 10, "--run", tmp_path / "run")
    assert "stopped after step 5" in out and "adapter of rank 8" in out
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 10 and rows[-1]["critic/rewards/mean"] > rows[0]["critic/rewards/mean"] + 0.1, "it learns"
    assert float(out.partition("differ from PEFT's by ")[2].split()[0]) < 1e-5


def test_train_drafter(example, tmp_path):
    out = example("train_drafter.py", "--seconds", 0.1, "--prompts", 4, "--tokens", 32, "--out", tmp_path / "drafter")
    assert "accept length" in out and (tmp_path / "drafter" / "config.json").is_file()


def test_trl_grpo(example, tmp_path):
    words = ("--tokens", 40, "--batch", 8, "--output", tmp_path)
    out = example("trl_grpo.py", "--steps", 1, *words)
    assert "step 1 " in out and "accept length" in out
    assert "step 2 " in example("trl_grpo.py", "--steps", 2, "--resume", *words)


def test_evaluate(example, tmp_path):
    words = ("--steps", 2, "--every", 1, "--prompts", 4, "--tokens", 48, "--run", tmp_path / "run")
    out = example("evaluate.py", *words)
    assert [line for line in out.splitlines() if line.startswith("step   ")][-1].startswith("step   2: pass@1 ")
    assert "pass@4, last minus first: " in out and "the best by pass@4 is step " in out
    row = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert 0 <= row["val-core/countdown/pass@1"] <= row["val-core/countdown/pass@4"] <= 1


def test_callbacks(example, tmp_path):
    out = example("callbacks.py", "--steps", 9, "--enough", 0.0, "--tokens", 60, "--run", tmp_path / "run")
    assert "the run ends after step 3: the mean reward of 3 steps is" in out and "3 steps; words per answer" in out
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 3 and all(row["answers/words"] > 0 for row in rows)


def test_notebook(monkeypatch):
    """In a kernel of its own: progress is shown, and a run in a thread is stopped."""
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    monkeypatch.setenv("STEPS", "2")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = [str(cell.get("outputs", "")) for cell in notebook.cells]
    text = " ".join(shown)
    assert "step 1/2" in text and "learning: grpo" in text, "progress"
    assert "mean reward: first" in text and "<h2>Learning</h2>" in text
    assert "resume with: paceline train --resume" in text and "'stopped" in shown[-1]
