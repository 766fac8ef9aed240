"""Damaged run directories: every command that reads one does its work, or ends with one sentence and loses nothing."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config.loading import build_config
from paceline.errors import UserError
from paceline.files import reading
from paceline.run import Run

from ..digits import DIGITS
from ..test_cli import here
from .mutate import damage, untouched, watchdog

QUICK = [
    "steps=2", "rollout.prompts=1", "rollout.samples=2", "rollout.max_tokens=12", "checkpoint.every=1",
    "log.tensorboard=false", "model.threads=1", "cluster.workers=1", "learn.lr=1e-4", "reward.workers=0",
    "spot.when=update", "spot.share=0.01", "speculation.suffix_mb=1", "rollout.kv_memory_gb=0.02", DIGITS,
    "eval.task=countdown", "eval.prompts=2", "eval.max_tokens=6", "eval.every=1",
]  # fmt: skip
OWN = (
    "config.yaml", "metrics.jsonl", "samples.jsonl", "answers.jsonl", "timeline.json", "state.json",
    "learner-0.safetensors", "training.json", "training.safetensors", "decided.yaml", "config.json",
    "model.safetensors", "tokenizer.json", "tokenizer_config.json", "evaluations.jsonl", "evaluation_samples.jsonl",
    "best.json",
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


def rearrange(dice: random.Random, run: Path, secret: Path) -> str:
    """Spoil the layout of a run rather than a file of it."""
    checkpoints = run / "checkpoints"
    newest = checkpoints / NEWEST
    act = dice.randrange(8)
    if act == 0:
        (checkpoints / dice.choice(("step-abc", "step-", "step-99999999999999999999", "step-1e9", "x"))).mkdir()
    elif act == 1:
        (checkpoints / dice.choice(("step-000003", "step-7", ".old-step-000003"))).write_text("not a folder")
    elif act == 2:
        (checkpoints / dice.choice(("step-000003", "step-000002"))).mkdir(exist_ok=True)
    elif act == 3:
        elsewhere = secret.parent / f"{run.name}-elsewhere"
        newest.rename(elsewhere)
        newest.symlink_to(elsewhere)
    elif act == 4:
        newest.rename(checkpoints / dice.choice(("step-000009", "step-2", "step-000002.bak", ".old-step-000002")))
    elif act == 5:
        (checkpoints / "step-000003").symlink_to(dice.choice(("step-000003", "nowhere", "step-000001", "..")))
    elif act == 6:
        shutil.rmtree(checkpoints)
        checkpoints.write_text("") if dice.random() < 0.5 else checkpoints.symlink_to(secret.parent)
    else:
        shutil.rmtree(newest / dice.choice(("drafter", ".")), ignore_errors=True)
    return f"layout {act}"


def command(words: list[str], secret: Path, capsys) -> int:
    capsys.readouterr()
    with watchdog(), untouched(secret):
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


def small(run: Path, finished: Path) -> bool:
    """Whether going on takes a moment: a damaged config may well be that of a long run."""
    own = Run.open(finished).config
    try:
        config = Run.open(run).config
    except UserError:
        return True
    same = ("rollout", "learn", "spot", "cluster", "speculation", "model")
    return config.steps <= 3 and config.reward.workers == 0 and all(getattr(config, n) == getattr(own, n) for n in same)


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
            file.write_text(file.read_text().replace("\nsteps: 2\n", "\nsteps: 3\n"))
        what = []
        for _ in range(dice.choice((1, 1, 1, 3))):
            if dice.random() < 0.1 and not any(name.startswith("layout") for name in what):
                what.append(rearrange(dice, run, secret))  # once: it needs a layout that is whole
                continue
            files = [p for p in sorted(run.rglob("*")) if p.name in OWN and not p.is_symlink() and p.is_file()]
            files = [p for p in files if p.parent.name in (NEWEST, "drafter", "run") or p.parent == run]
            what.append(damage(dice, dice.choice(files), secret))
        before = contents(run)
        for words in commands(run, out):
            if words[0] == "train" and not small(run, finished):
                continue
            try:
                code = command(words, secret, capsys)
                if words[0] != "train":
                    assert contents(run) == before, "reading changes nothing"
                elif code == 2:
                    nothing_is_lost(before, contents(run))
            except BaseException as err:
                err.add_note(f"number {number} of seed {seed}: {', '.join(what)}; {' '.join(words)}")
                raise
            done[words[0], code] += 1
        for path in (run, out, folder / f"{run.name}-elsewhere"):
            shutil.rmtree(path, ignore_errors=True)
    return done


def settings(config: bytes) -> object:
    """What a config says, but for where the run is: a resumed run writes that down anew, and here it is a copy. A
    number that was written as a text says the same."""
    try:
        values = reading.parse_yaml(reading.decode(config, "it"), "it")
        return build_config(values | {"run_dir": None}, "it") if isinstance(values, dict) else config
    except UserError:
        return config


def nothing_is_lost(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    """Whoever could not go on has the checkpoints as they were, and the lines of the logs up to the newest one."""
    steps = [int(name[17:23]) for name in before if re.fullmatch(r"checkpoints/step-[0-9]{6}/state\.json", name)]
    newest = max(steps, default=0)
    for name, data in before.items():
        if name == "config.yaml":
            assert settings(after[name]) == settings(data), name
        elif name.startswith("checkpoints/"):
            recovered = name.replace("checkpoints/.old-", "checkpoints/")  # a save that was cut off is taken back
            assert after.get(name, after.get(recovered)) == data, name
        elif name.endswith(".jsonl"):
            kept = after[name].split(b"\n")
            *whole, half = data.split(b"\n")
            lost = [json.loads(line)["step"] for line in whole if line.strip() and line not in kept]
            if half and half not in kept and is_json(half):
                lost.append(json.loads(half)["step"])
            assert all(step > newest for step in lost), (name, lost)


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_damaged_run_directories(finished, tmp_path, capsys):
    done = fuzz(finished, tmp_path, 24, seed=0, capsys=capsys)
    assert min(done["report", 0], done["report", 2], done["train", 0], done["train", 2]) >= 3, done


@pytest.mark.soak
def test_many_damaged_run_directories(finished, tmp_path, capsys):
    done = fuzz(finished, tmp_path, 500, seed=1, capsys=capsys)
    assert min(done["report", 0], done["report", 2], done["train", 0], done["train", 2]) >= 80, done
