"""The paths of those who come from TRL and from verl: what the pages show is run as it stands there, with a tiny model
under the name of the real one, and with fewer steps, prompts and tokens."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.metrics import read_lines

from .test_cli import here
from .test_docs import DOCS, FENCE, join
from .tied import make_tied

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SMALL = ["steps=1", "rollout.prompts=2", "rollout.max_tokens=16", "log.tensorboard=false", "model.threads=1"]
BRIEF = """
def brief(prompts, completions, answer, **columns):
    assert len(prompts) == len(completions) == len(answer) > 1, "a group, as in TRL"
    return [1.0 / (1 + len(message["content"])) for (message,) in completions]
"""
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str) % 3), "right": ground_truth in solution_str}
"""


def blocks(page: str, kind: str) -> list[str]:
    return [block for k, block in FENCE.findall((DOCS / page).read_text(encoding="utf-8")) if k == kind]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_tied(tmp_path / MODEL)
    return tmp_path


def rows() -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"{i}+{i}=?"}], "answer": str(2 * i)} for i in range(8)]


def test_the_script_from_trl(folder):
    """TRL's arguments, rows and function, handed to `Trainer` as the page does."""
    (code,) = [block for block in blocks("from-trl.md", "python") if "Trainer(" in block and "GRPOTrainer" not in block]
    words: dict[str, Any] = {}
    exec(BRIEF, words)
    from paceline import Trainer

    words |= {"Trainer": Trainer, "dataset": rows()}
    small = code.replace("steps=200", 'steps=1, run_dir="run"').replace(
        '"rollout.max_tokens": 1024', '"rollout.max_tokens": 16, "rollout.prompts": 2, "log.tensorboard": False'
    )
    assert small.count("16") == 1 and "steps=1," in small, "the page is run, but smaller"
    exec(small, words)
    assert (words["done"].checkpoint / "generation_config.json").is_file()
    (row,) = read_lines(folder / "run" / "metrics.jsonl")
    assert row["reward/brief"] > 0 and "actor/kl_loss" in row


def test_the_command_from_trl(folder):
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows())))
    (folder / "reward.py").write_text(BRIEF)
    (command,) = [block for block in blocks("from-trl.md", "sh") if block.startswith("paceline train")]
    words = shlex.split(join(command))
    assert here(*words[1:], *SMALL, "run_dir=run") == 0
    assert read_lines(folder / "run" / "metrics.jsonl")[0]["reward/reward.py:brief"] > 0


def test_the_command_from_verl(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = [
        {
            "data_source": "openai/gsm8k",
            "prompt": row["prompt"],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": i},
        }
        for i, row in enumerate(rows())
    ]
    (folder / "gsm8k").mkdir()
    pq.write_table(pa.Table.from_pylist(table), folder / "gsm8k" / "train.parquet")
    (folder / "reward.py").write_text(SCORE)
    (command,) = [block for block in blocks("from-verl.md", "sh") if block.startswith("paceline train")]
    words = shlex.split(join(command))
    assert here(*words[1:], *SMALL, "run_dir=run") == 0
    (row,) = read_lines(folder / "run" / "metrics.jsonl")
    assert "reward/reward.py:compute_score" in row and {"critic/rewards/mean", "timing_s/gen"} <= row.keys()


@pytest.mark.parametrize("page", ["from-trl.md", "from-verl.md"])
def test_their_words_are_understood(page, capsys):
    """What somebody types from memory says what to type here."""
    text = (DOCS / page).read_text(encoding="utf-8")
    quoted = re.findall(r'ends? with\s+"((?:TRL|verl)\'s\s+\'([\w.]+)\'\s+is\s+\'([\w.]+)\'\s+here)"', text)
    assert quoted
    for sentence, theirs, _ in quoted:
        assert here("train", f"{theirs}=8") == 2
        assert capsys.readouterr().err.strip().endswith(" ".join(sentence.split()))
