"""Every example runs, small, and does what it says."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest

from paceline.observe.metrics import read_lines

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


def test_own_dataset(example, tmp_path):
    run = tmp_path / "run"
    assert "2 steps" in example("own_dataset.py", "--steps", 2, "--prompts", 2, "--run", run)
    before = read_lines(run / "metrics.jsonl")
    assert before[0]["critic/rewards/mean"] > 0
    shutil.rmtree(run / "checkpoints" / "step-000002")  # as if it had been killed after the first step
    example("own_dataset.py", "--resume", "--run", run)
    after = read_lines(run / "metrics.jsonl")
    assert [row["critic/rewards/mean"] for row in after] == [row["critic/rewards/mean"] for row in before]


def test_own_model(example, tmp_path):
    out = example("own_model.py", "--steps", 10, "--run", tmp_path / "run")
    line = next(line for line in out.splitlines() if line.startswith("mean reward"))
    first, last = (float(part.split()[-1]) for part in line.split(","))
    assert last > first + 0.2, "it learns"
    assert (tmp_path / "run" / "checkpoints" / "step-000010" / "model.safetensors").is_file()


def test_train_drafter(example, tmp_path):
    out = example("train_drafter.py", "--seconds", 0.1, "--prompts", 4, "--tokens", 32, "--out", tmp_path / "drafter")
    assert "accept length" in out and (tmp_path / "drafter" / "config.json").is_file()


def test_trl_grpo(example, tmp_path):
    words = ("--tokens", 40, "--batch", 8, "--output", tmp_path)
    out = example("trl_grpo.py", "--steps", 1, *words)
    assert "step 1 " in out and "accept length" in out
    assert "step 2 " in example("trl_grpo.py", "--steps", 2, "--resume", *words)


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
