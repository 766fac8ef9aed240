"""Damaged run directories: every command that reads one does its work, or ends with one sentence and loses nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..digits import DIGITS
from ..test_cli import here
from .mutate import damage, watchdog

QUICK = [
    "steps=2", "rollout.prompts=1", "rollout.samples=2", "rollout.max_tokens=12", "checkpoint.every=1",
    "log.tensorboard=false", "model.threads=1", "cluster.workers=1", "learn.lr=1e-4", "reward.workers=0",
    "spot.when=update", "spot.share=0.01", "speculation.suffix_mb=1", "rollout.kv_memory_gb=0.02", DIGITS,
]  # fmt: skip
OWN = (
    "config.yaml", "metrics.jsonl", "samples.jsonl", "answers.jsonl", "timeline.json", "state.json",
    "learner-0.safetensors", "training.json", "training.safetensors",
)  # fmt: skip
NEWEST = "step-000002"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two steps, both saved."""
    run = tmp_path_factory.mktemp("runs") / "run"
    assert here("train", *QUICK, f"run_dir={run}") == 0
    found = {path.name for path in run.rglob("*") if path.is_file()}
    assert set(OWN) <= found, "what is to be damaged is there"
    return run


def contents(folder: Path) -> dict[str, bytes]:
    """Of the checkpoints and the logs; what is not a file has none."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if not path.is_symlink() and path.is_file() and os.access(path, os.R_OK)
    }


def command(words: list[str], capsys) -> int:
    capsys.readouterr()
    with watchdog():
        code = here(*words)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert code in (0, 1, 2), said
    if code:
        assert said.startswith("paceline: ") and said.count("\n") == 1, said
        said.encode()
    return code


def commands(run: Path, out: Path) -> Iterator[list[str]]:
    yield ["report", str(run), "--out", str(out / "report.html")]
    yield ["export", str(run), str(out / "policy"), "--policy"]
    yield ["export", str(run), str(out / "drafter")]
    yield ["train", "--resume", str(run)]


def fuzz(finished: Path, folder: Path, count: int, seed: int, capsys) -> Counter[tuple[str, int]]:
    dice = random.Random(seed)
    done: Counter[tuple[str, int]] = Counter()
    secret = folder / "secret"
    for number in range(count):
        run, out = folder / f"run-{number}", folder / f"out-{number}"
        shutil.copytree(finished, run)
        out.mkdir()
        if dice.random() < 0.7:
            file = run / "config.yaml"
            file.write_text(file.read_text().replace("steps: 2", "steps: 3"))
        what = []
        for _ in range(dice.choice((1, 1, 1, 3))):
            files = [p for p in sorted(run.rglob("*")) if p.name in OWN and not p.is_symlink() and p.is_file()]
            files = [p for p in files if p.parent.name in (NEWEST, "drafter", "run") or p.parent == run]
            what.append(damage(dice, dice.choice(files), secret))
        before = contents(run)
        for words in commands(run, out):
            try:
                code = command(words, capsys)
            except BaseException as err:
                err.add_note(f"number {number} of seed {seed}: {', '.join(what)}; {' '.join(words)}")
                raise
            done[words[0], code] += 1
            if words[0] != "train":
                assert contents(run) == before, "reading changes nothing"
            elif code == 2:
                nothing_is_lost(before, contents(run))
        for path in (run, out):
            shutil.rmtree(path)
    return done


def nothing_is_lost(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    """Whoever could not go on has the checkpoints as they were, and the whole lines of the logs up to it."""
    for name, data in before.items():
        if name.startswith("checkpoints/") or name == "config.yaml":
            assert after[name] == data, name
        elif name.endswith(".jsonl"):
            kept = after[name].splitlines()
            lost = [line for line in data.splitlines() if line not in kept and b'"step"' in line]
            steps = [json.loads(line)["step"] for line in lost if line.endswith(b"}")]
            assert all(step > 1 for step in steps), (name, lost)


def test_damaged_run_directories(finished, tmp_path, capsys):
    done = fuzz(finished, tmp_path, 40, seed=0, capsys=capsys)
    assert min(done["report", 0], done["report", 2], done["train", 0], done["train", 2]) >= 5, done


@pytest.mark.soak
def test_many_damaged_run_directories(finished, tmp_path, capsys):
    done = fuzz(finished, tmp_path, 500, seed=1, capsys=capsys)
    assert min(done["report", 0], done["report", 2], done["train", 0], done["train", 2]) >= 50, done
