"""Kill -9 in the middle of conversations, then --resume: the numbers are those of a run that was never killed, and
what was returned before the kill is not asked for again."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from ..test_resume import finish, read, start
from ..tied import make_tied

WORLD = Path(__file__).parent / "world.py"
LETTERS = Path(__file__).parent / "letters.py"
SAME = ("critic/rewards/mean", "actor/pg_loss", "response_length/mean", "actor/grad_norm", "acting/turns/mean")
STEPS = 5


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder = make_tied(tmp_path_factory.mktemp("tied") / "model")
    rows = [{"prompt": [{"role": "user", "content": f"What is {i}?"}]} for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        f"model.path={folder}", f"task.name={folder / 'rows.jsonl'}", f"environment.name={WORLD}:Counting",
        "environment.options={slow: 0.02}", "environment.workers=1", "model.dtype=float64", "model.threads=1",
        f"reward.functions=[{{function: '{LETTERS}:letters'}}]", "rollout.prompts=3", "rollout.samples=4",
        "rollout.max_tokens=90", "learn.lr=1e-3", f"steps={STEPS}", "checkpoint.every=2", "log.tensorboard=false",
    ]  # fmt: skip


def turns(run: Path) -> list[dict]:
    """Those that are written to their end."""
    file = run / "turns.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_killed_in_the_middle_of_conversations(words, tmp_path):
    finish(start(*words, f"run_dir={tmp_path / 'undisturbed'}"))
    undisturbed = read(tmp_path / "undisturbed")
    assert len(undisturbed) == STEPS and all(row["actor/grad_norm"] > 0 for row in undisturbed.values())
    all_turns = turns(tmp_path / "undisturbed")
    dice = random.Random(7)
    run = tmp_path / "run"
    command = [*words, f"run_dir={run}"]
    for wanted in sorted(dice.sample(range(8, len(all_turns) - 8), 2)):
        process = start(*command)
        end = time.monotonic() + 300
        while len(turns(run)) < wanted and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.005)
        process.kill()
        process.wait(60)
        command = ["--resume", str(run)]
    finish(start(*command))
    rows = read(run)
    assert rows.keys() == undisturbed.keys()
    for step, row in rows.items():
        assert {name: row[name] for name in SAME} == pytest.approx({n: undisturbed[step][n] for n in SAME}, rel=1e-9)
    made = turns(run)
    assert len({row["key"] for row in made}) == len(made), "nothing is recorded twice"
    assert {row["key"]: row["observation"] for row in made} == {row["key"]: row["observation"] for row in all_turns}
