"""Conversations in whole runs: the same tokens and the same policy whatever decodes them, in float64 on a CPU."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from paceline.core import Group
from paceline.loop import TrainLoop
from paceline.observe.metrics import read_lines
from paceline.observe.timeline import read_timeline
from paceline.run import Run

from ..cluster.runs import Recorded, make, policy, same_policy
from ..tied import make_tied

WORLD = Path(__file__).parent / "world.py"
LETTERS = f"reward.functions=[{{function: '{Path(__file__).parent / 'letters.py'}:letters'}}]"


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    """A chat model with several stop tokens, and prompts for it."""
    folder = make_tied(tmp_path_factory.mktemp("tied") / "model")
    rows = [{"prompt": [{"role": "user", "content": f"What is {i}?"}], "start": i} for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def words(tied: Path, *more: str, world: str = "Counting") -> list[str]:
    return [
        f"model.path={tied}", f"task.name={tied / 'rows.jsonl'}", f"environment.name={WORLD}:{world}",
        "rollout.max_tokens=100", "environment.workers=1", LETTERS, *more,
    ]  # fmt: skip


Kept = list[dict[int, tuple[list[int], tuple]]]


class Conversing(Recorded):
    kept: Kept

    def _collect(self, clock) -> tuple[list[Group], int]:
        groups, cursor = super()._collect(clock)
        done = {i: (c.tokens, c.observed) for g in groups for i, c in g.completions.items()}
        self.kept = [*getattr(self, "kept", []), done]
        return groups, cursor


def converse(folder: Path, tied: Path, *more: str, steps: int = 2, world: str = "Counting"):
    trainer = make(folder, f"steps={steps}", *words(tied, *more, world=world))
    trainer.__class__ = Conversing
    try:
        for _ in range(steps):
            trainer.step()
        return trainer.kept, policy(trainer)
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def plain(tied, tmp_path_factory):
    kept, learned = converse(tmp_path_factory.mktemp("plain") / "run", tied, "speculation.mode=plain")
    turns = [len(observed) for step in kept for _, observed in step.values()]
    assert sum(turns) > 16 and max(turns) >= 3, "there are conversations"
    return kept, learned


@pytest.mark.parametrize(
    ("more", "world"),
    [
        (["speculation.strategies=[suffix:6, suffix:4x2/8]"], "Counting"),
        (["rollout.max_batch=1", "rollout.page_size=8"], "Counting"),
        (["rollout.page_size=16", "rollout.max_batch=3"], "Slow"),
        (["cluster.workers=2"], "Counting"),
        (["cluster.workers=4", "environment.workers=3"], "Slow"),
        (["cluster.workers=2", "rollout.write_ahead=true"], "Counting"),
    ],
)
def test_the_same_tokens_and_the_same_policy(plain, tied, tmp_path, more, world):
    kept, learned = converse(tmp_path / "run", tied, *more, world=world)
    assert kept == plain[0] and same_policy(learned, plain[1])


@pytest.mark.parametrize("struck", [0, 1])
def test_a_killed_worker_changes_nothing(plain, tied, tmp_path, struck):
    """While its conversations go on: the other one writes them again, and is told the same."""
    trainer = make(tmp_path / "run", "steps=2", *words(tied, "cluster.workers=2", world="Slow"))
    trainer.__class__ = Conversing
    held = threading.Event()

    def strike() -> None:
        conversations = trainer.finished.conversations
        end = time.monotonic() + 60
        while sum(len(c.answers) for c in list(conversations._open.values())) < 6 and time.monotonic() < end:
            time.sleep(0.002)
        trainer.cluster.transport.kill(struck)
        held.set()

    try:
        threading.Thread(target=strike, daemon=True).start()
        trainer.step()
        assert held.is_set() and trainer.cluster.lost == [struck]
        trainer.step()
        assert trainer.kept == plain[0] and same_policy(policy(trainer), plain[1])
    finally:
        trainer.close()


def test_a_run_that_was_killed_sees_what_was_recorded(tied, tmp_path):
    """With an environment that says something else each time: the steps behind the checkpoint are made again, and told
    the same, up to the turn at which the run was killed."""
    run = tmp_path / "run"
    trainer = make(run, "steps=3", *words(tied, "checkpoint.every=1", world="Dice"))
    trainer.__class__ = Conversing
    trainer.step()
    shutil.copytree(run / "checkpoints", tmp_path / "after-1")
    trainer.step()
    second = trainer.kept[1]
    trainer.close()
    shutil.rmtree(run / "checkpoints")
    lines = (run / "turns.jsonl").read_bytes().splitlines(keepends=True)
    of_second = [line for line in lines if json.loads(line)["step"] == 2]
    for cut in (0, len(of_second) // 2):
        left = b"".join(lines[: len(lines) - cut])
        folder = tmp_path / f"without-{cut}"
        shutil.copytree(run, folder)
        shutil.copytree(tmp_path / "after-1", folder / "checkpoints")
        (folder / "turns.jsonl").write_bytes(left + b'{"step": 2, "key": "half a')
        again = Conversing(Run.open(folder).config, Run.open(folder))
        try:
            again.step()
            made = again.kept[0]
        finally:
            again.close()
        if not cut:
            assert made == second
            assert (folder / "turns.jsonl").read_bytes() == left, "nothing is recorded twice"
            continue
        assert made != second, "what was not recorded was asked for anew"
        for request, (tokens, observed) in second.items():
            told = sum(json.loads(line)["request"] == request for line in of_second[: len(of_second) - cut])
            ends = [last for _, last in observed[:told]]
            assert made[request][0][: max(ends, default=1)] == tokens[: max(ends, default=1)]


def test_what_is_counted(tied, tmp_path):
    more = ["environment.max_turns=3", "environment.options={slow: 0.1}"]
    trainer = make(tmp_path / "run", "steps=1", *words(tied, *more))
    try:
        metrics = trainer.step()
        trainer.recorder.timeline.close()
    finally:
        trainer.close()
    assert "wait for tools" in {span.name for span in read_timeline(tmp_path / "run" / "timeline.json")}
    assert 1 < metrics["acting/turns/mean"] <= metrics["acting/turns/max"] <= 3
    assert metrics["acting/tool_errors"] == 0 and metrics["acting/tool_s"] > 0.1 * metrics["acting/turns/mean"]
    assert read_lines(tmp_path / "run" / "metrics.jsonl") == []  # the loop writes them, which this test has not run


def test_tools_in_a_chat_template(tied, tmp_path):
    """A whole run with tools; a random model never calls one, so that each answer is one turn."""
    more = ["environment.name=null", f"environment.tools=['{WORLD}:add', '{WORLD}:upper']"]
    trainer = make(tmp_path / "run", "steps=1", *words(tied, *more))
    try:
        assert isinstance(trainer, TrainLoop)
        metrics = trainer.step()
        prompt = trainer.prompts.group(0).sample.prompt
    finally:
        trainer.close()
    assert metrics["acting/turns/mean"] == 1.0
    assert prompt[0]["role"] == "system" and "- add(a: integer, b: integer): Add two numbers." in prompt[0]["content"]


def test_an_environment_alone_gives_the_reward(tied, tmp_path):
    more = [*words(tied), "reward.functions=[]"]
    trainer = make(tmp_path / "run", "steps=1", *more, "eval.task=" + str(tied / "rows.jsonl"), "eval.prompts=3")
    try:
        trainer.step()
        result = trainer.after_step.evaluations.evaluator.run(1, RuntimeError)
    finally:
        trainer.close()
    rewards = [
        r for row in (tmp_path / "run" / "answers.jsonl").read_text().splitlines() for r in json.loads(row)["rewards"]
    ]
    assert len(set(rewards)) > 2 and all(0 <= r <= 4 for r in rewards)
    assert any(c.observed for g in result.groups for c in g.completions.values())
    assert torch.isfinite(torch.tensor(rewards)).all()


@pytest.mark.parametrize("on_error", ["tell", "end"])
def test_an_environment_that_does_everything_wrong_stops_no_run(tied, tmp_path, on_error):
    more = [f"environment.on_error={on_error}", "environment.timeout_s=2", "environment.max_chars=20"]
    trainer = make(tmp_path / "run", "steps=2", *words(tied, *more, "environment.workers=2", world="Trouble"))
    try:
        metrics = [trainer.step() for _ in range(2)]
    finally:
        trainer.close()
    assert sum(m["acting/tool_errors"] for m in metrics) > 4
    rows = [json.loads(line) for line in (tmp_path / "run" / "turns.jsonl").read_text().splitlines()]
    said = "\n".join(row["observation"] for row in rows if row["failed"])
    for sentence in ("error: ended its process", "error: ValueError: no", "error: step returned"):
        assert sentence in said
    assert max(len(row["observation"]) for row in rows if not row["failed"]) < 70
    if on_error == "end":
        assert all(row["done"] for row in rows if row["failed"])
