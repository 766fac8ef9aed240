"""A run directory: which checkpoint is the newest, what is deleted, and what a damaged one says."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import load_config
from paceline.errors import UserError
from paceline.files.writing import append_text, write_aside
from paceline.learn.state import load_learner
from paceline.observe.metrics import append_line, cut_lines, read_lines
from paceline.run import Progress, Run

from .digits import DIGITS
from .test_cli import here

QUICK = [
    "steps=2", "rollout.prompts=1", "rollout.samples=2", "rollout.max_tokens=12", "checkpoint.every=1",
    "log.tensorboard=false", "model.threads=1", "cluster.workers=1", "learn.lr=1e-4", "reward.workers=0",
    "spot.when=update", "spot.share=0.01", DIGITS,
]  # fmt: skip


class NoTokenizer:
    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def empty_run(folder: Path, keep: int = 2) -> Run:
    return Run.create(load_config(None, [f"run_dir={folder}", f"checkpoint.keep={keep}"]))


def save(run: Run, step: int) -> Path:
    return run.save(lambda folder: {"round": step}, NoTokenizer(), Progress(step=step))


def names(run: Run) -> list[str]:
    return sorted(os.listdir(run.checkpoints))


def test_the_newest_checkpoint_is_the_one_with_the_highest_number(tmp_path):
    run = empty_run(tmp_path / "run")
    for step in (999_998, 999_999, 1_000_000):
        save(run, step)
    assert run.newest_checkpoint().name == "step-1000000"
    assert names(run) == ["step-1000000", "step-999999"], "of which the oldest are let go by number, too"


def test_only_checkpoints_are_let_go(tmp_path):
    run = empty_run(tmp_path / "run", keep=1)
    (run.checkpoints / "step-best").mkdir()
    (run.checkpoints / "step-000001.bak").mkdir()
    (run.checkpoints / "step-000000").mkdir()  # not written by a run: it has no state
    (run.checkpoints / ".keep-me").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "state.json").write_text("{}")
    (run.checkpoints / "step-000001").symlink_to(elsewhere)
    for step in (2, 3):
        save(run, step)
    left = [".keep-me", "step-000000", "step-000001", "step-000001.bak", "step-000003", "step-best"]
    assert names(run) == left and (elsewhere / "state.json").exists()
    assert run.newest_checkpoint().name == "step-000003"


def test_a_kill_while_a_checkpoint_is_replaced_loses_none(tmp_path):
    run = empty_run(tmp_path / "run", keep=1)
    target = run.save(lambda folder: None, NoTokenizer(), Progress(step=4))
    target.rename(run.checkpoints / ".old-step-000004")
    (run.checkpoints / ".partial-123").mkdir()
    assert run.restore().step == 4 and names(run) == ["step-000004"]


def test_a_start_that_fails_leaves_a_folder_that_was_there_as_it_was(tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    assert here("train", *QUICK, "task.difficulty=silly", f"run_dir={mine}") == 2
    assert "easy, medium" in capsys.readouterr().err
    assert (mine / "thesis.txt").read_text() == "years of work" and not (mine / "config.yaml").exists()


def test_logs_are_cut_line_by_line(tmp_path):
    log = tmp_path / "metrics.jsonl"
    append_line(log, {"step": 1, "loss": math.nan, "name": 0.5})
    append_line(log, {"step": 2, "loss": math.inf})
    append_text(log, '{"step": 3, "lo')
    assert "NaN" not in log.read_text(), "which is not JSON"
    rows = read_lines(log)
    assert [row["step"] for row in rows] == [1, 2] and all(math.isnan(row["loss"]) for row in rows)
    first = log.read_bytes().split(b"\n")[0]
    cut_lines(log, 1)
    assert log.read_bytes() == first + b"\n"


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '{"step": -1}', '{"step": "1"}', '{"step": true}', '{"step": 1.5}'])
def test_a_damaged_line_is_not_lost(tmp_path, line):
    log = tmp_path / "metrics.jsonl"
    text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    log.write_text(text)
    with pytest.raises(UserError, match=r"line 2 of .*fix or remove that line"):
        cut_lines(log, 9)
    assert log.read_text() == text and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_nothing_is_written_through_links(tmp_path):
    secret, run = tmp_path / "secret", tmp_path / "run"
    secret.write_text("mine\n")
    run.mkdir()
    (run / "metrics.jsonl").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        append_line(run / "metrics.jsonl", {"step": 1})
    with pytest.raises(UserError, match=r"is a link to .*, outside its folder"):
        cut_lines(run / "metrics.jsonl", 1)
    write_aside(run / "metrics.jsonl", "new\n")
    assert secret.read_text() == "mine\n" and (run / "metrics.jsonl").read_text() == "new\n"
    for trap in ("metrics.tmp", ".config.yaml.tmp", ".metrics.jsonl.tmp"):  # names that could be foreseen
        (run / trap).symlink_to(secret)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    cut_lines(run / "metrics.jsonl", 1)
    assert secret.read_text() == "mine\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    assert here("train", *QUICK, f"run_dir={run}") == 0
    return run


@pytest.fixture
def run(finished, tmp_path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


STATES = {
    "not JSON": ("{", "is not valid JSON"),
    "a list": ("[]", "not an object"),
    "nested": ("[" * 1000 + "]" * 1000, "nested more than 100 levels"),
    "negative": ({"step": -2}, "'step' = -2"),
    "words": ({"cursor": "three"}, "'cursor' = 'three'"),
    "a truth value": ({"bad_updates": True}, "'bad_updates' = True"),
    "another step": ({"step": 7}, "is of step 7"),
    "from a later version": ({"wisdom": 1}, "'wisdom'"),
    "a tuner without costs": ({"tuner": {"round": 1}}, "'tuner' of"),
    "a tuner of words": ({"tuner": "fast"}, "'tuner' = 'fast'"),
    "never trained": ({"backoff": {"every": 0, "gains": [], "levels": [], "rollout": 1, "best_rollout": 0}}, "'every'"),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_a_damaged_checkpoint_says_to_remove_it(case, run, capsys):
    change, problem = STATES[case]
    file = run / "checkpoints" / "step-000002" / "state.json"
    file.write_text(change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change))
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl", "answers.jsonl")}
    assert here("train", "--resume", run) == 2
    said = capsys.readouterr().err
    assert problem in said and "remove it to go on from an older one" in said and said.count("\n") == 1
    assert before == {name: (run / name).read_bytes() for name in before}
    shutil.rmtree(file.parent)
    assert here("train", "--resume", run) == 0, "as it says"
    assert [row["step"] for row in read_lines(run / "metrics.jsonl")] == [1, 2]


def test_half_a_config_is_not_taken_for_a_whole_one(run, capsys):
    file = run / "config.yaml"
    text = file.read_text()
    for length in (0, text.index("rollout:"), text.index("log:")):
        file.write_text(text[:length])
        assert here("train", "--resume", run) == 2
        assert "config.yaml is not whole: it has no" in capsys.readouterr().err


def test_what_a_run_saves_can_be_read(run):
    progress = Run.open(run).restore()
    assert progress.step == 2 and progress.tuner and progress.metrics and progress.backoff
    assert asdict(progress).keys() == json.loads((run / "checkpoints/step-000002/state.json").read_text()).keys()


class Learner:
    """As far as its state goes."""

    def __init__(self, state: dict[str, torch.Tensor]):
        self.own = state
        self.model = torch.nn.Linear(1, 1)
        self.model.device = "cpu"
        self.loaded = False

    def state(self) -> dict[str, torch.Tensor]:
        return self.own

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self.loaded = True


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda t: t | {"optimizer.mean.a": t["optimizer.mean.a"] * math.nan}, "NaN or infinite"),
        (lambda t: t | {"optimizer.mean.a": torch.full((2, 3), math.inf)}, "NaN or infinite"),
        (lambda t: t | {"optimizer.mean.a": torch.zeros(1, 3)}, r"shape \[1, 3\], but the model needs \[2, 3\]"),
        (lambda t: t | {"optimizer.mean.a": torch.zeros(2, 3, dtype=torch.int8)}, "of type int8"),
        (lambda t: t | {"optimizer.mean.a": torch.zeros(2, 3).to(torch.float8_e4m3fn)}, "of type float8"),
        (lambda t: t | {"optimizer.square.a": -torch.ones(2, 3)}, "negative numbers"),
        (lambda t: t | {"updates": torch.tensor(-1)}, "updates is -1"),
        (lambda t: {"updates": t["updates"]}, "has no tensor"),
    ],
)
def test_a_damaged_learner_is_refused(tmp_path, spoil, problem):
    state = {
        "optimizer.mean.a": torch.ones(2, 3),
        "optimizer.square.a": torch.ones(2, 3),
        "optimizer.steps": torch.tensor(2),
        "updates": torch.tensor(2),
    }
    save_file(state, tmp_path / "learner-0.safetensors")
    whole = Learner(state)
    load_learner(whole, tmp_path)
    assert whole.loaded
    save_file(spoil(state), tmp_path / "learner-0.safetensors")
    spoiled = Learner(state)
    with pytest.raises(UserError, match=problem + ".*remove it to go on from an older one"):
        load_learner(spoiled, tmp_path)
    assert not spoiled.loaded, "all or nothing"
    (tmp_path / "learner-0.safetensors").unlink()
    os.mkfifo(tmp_path / "learner-0.safetensors")
    with pytest.raises(UserError, match="not an ordinary file"):
        load_learner(spoiled, tmp_path)


def test_numbers_of_the_drafters_training_are_finite(run, capsys):
    drafter = run / "checkpoints" / "step-000002" / "drafter"
    tensors = load_file(drafter / "training.safetensors")
    name = next(name for name in tensors if name.startswith("master."))
    save_file(tensors | {name: torch.full_like(tensors[name], math.nan)}, drafter / "training.safetensors")
    assert here("train", "--resume", run) == 2
    said = capsys.readouterr().err
    assert "holds NaN or infinite numbers" in said and "to begin anew" in said
    for file in ("training.safetensors", "training.json"):
        (drafter / file).unlink()
    assert here("train", "--resume", run) == 0, "as it says"
