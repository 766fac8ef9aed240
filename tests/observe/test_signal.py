"""When nothing can be learned, the likely cause is named, once, in the terminal and in the report."""

from __future__ import annotations

import pytest

from paceline import Trainer
from paceline.config import Config, flat, load_config
from paceline.loop import train
from paceline.observe.live import LiveView
from paceline.observe.signal import LOOK_BACK, causes_now, find_causes
from paceline.report.page import write_report

NEUTRAL = dict(flat(Config().model_dump(mode="json")))
LEARNS = {
    "groups/mixed": 0.5, "critic/rewards/min": 0.0, "critic/rewards/max": 1.0, "response_length/clip_ratio": 0.1,
    "reward/math": 0.4,
}  # fmt: skip
DEAD = LEARNS | {"groups/mixed": 0.0, "critic/rewards/max": 0.0, "reward/math": 0.0}
CASES = {
    "it learns": ({}, LEARNS, None),
    "one sample": ({"rollout.samples": 1}, LEARNS, "set rollout.samples to 4 or more"),
    "one sample, over the batch": ({"rollout.samples": 1, "learn.algorithm": "reinforce_pp"}, LEARNS, None),
    "greedy": ({"rollout.temperature": 0}, DEAD, "rollout.temperature=0 makes all answers to a prompt the same"),
    "never fires": ({}, DEAD, "every answer got the reward 0 in 3 steps: the function never fires"),
    "cut": (
        {},
        DEAD | {"response_length/clip_ratio": 0.8},
        "80% of the answers were cut at rollout.max_tokens=512, and",
    ),
    "all the same": ({}, DEAD | {"critic/rewards/min": 1.0, "critic/rewards/max": 1.0}, "does not tell answers apart"),
    "within groups": ({}, DEAD | {"critic/rewards/max": 1.0}, "too easy or too hard"),
    "no opinion": ({}, {k: v for k, v in DEAD.items() if k != "reward/math"}, "all returned None"),
    "cut, but mixed": ({}, LEARNS | {"response_length/clip_ratio": 0.6}, "60% of the answers were cut"),
    "one of two": ({}, LEARNS | {"reward/form": 0.0}, "the reward form was 0 on average in each of 3 steps"),
}


@pytest.mark.parametrize("case", CASES)
def test_causes(case):
    settings, row, words = CASES[case]
    rows = [{"step": step} | row for step in range(1, LOOK_BACK + 3)]
    found = find_causes(NEUTRAL | settings, rows)
    assert [words in one.sentence for one in found] == ([True] if words else []), found


def test_it_takes_a_few_steps_unless_settings_say_it():
    rows = [{"step": 1} | DEAD, {"step": 2} | LEARNS, {"step": 3} | DEAD, {"step": 4} | DEAD]
    assert not find_causes(NEUTRAL, rows)
    (one,) = find_causes(NEUTRAL, [*rows, {"step": 5} | DEAD])
    assert one.step == 5 and one.cause == "equal"
    assert causes_now(NEUTRAL | {"rollout.samples": 1}, [{"step": 1} | DEAD])[0].step == 1


def test_a_heading_says_how_much_of_the_run_it_is_about():
    rows = [{"step": i} | LEARNS | {"reward/a": 0.5, "reward/b": 0.0} for i in range(1, LOOK_BACK + 1)]
    (one,) = find_causes(NEUTRAL, rows)
    assert one.cause == "reward/b" and one.heading == "one reward may teach nothing"
    assert find_causes(NEUTRAL, [{"step": i} | DEAD for i in range(1, 4)])[0].heading == "nothing may be learned"


SMALL = {
    "rollout.prompts": 2, "rollout.samples": 2, "rollout.max_tokens": 8, "log.tensorboard": False, "model.threads": 1,
    "speculation.mode": "plain",
}  # fmt: skip
ROWS = [{"prompt": f"Make {i} from 1 2."} for i in range(2, 6)]


def test_it_is_said_once_and_stands_in_the_report(tmp_path, capsys):
    run = tmp_path / "run"
    silent = lambda completions: [None] * len(completions)  # noqa: E731
    done = Trainer("embedded", ROWS, silent, steps=5, run_dir=run, settings=SMALL, progress=True).train()
    said = capsys.readouterr().out
    sentence = "no reward function gave a value in 3 steps: all returned None"
    assert said.count("nothing may be learned") == 1 and sentence in said
    assert said.index("step 2/5") < said.index(sentence) < said.index("step 4/5")
    page = done.report().read_text()
    assert page.count(sentence) == 1 and "nothing may be learned, since step 3" in page
    again = Trainer.resume(run, ROWS, silent, settings={"steps": 7}, progress=True).train()
    assert "nothing may be learned" not in capsys.readouterr().out, "nor when it is resumed"
    assert len(again.metrics) == 7
    assert "steps</code> 5 → 7 after step 5" in again.report().read_text(), "the report says what has changed"


def test_a_step_says_how_it_learns(tmp_path, capsys):
    words = ["steps=1", "rollout.prompts=2", "rollout.samples=2", "rollout.max_tokens=30", "log.tensorboard=false"]
    more = ["cluster.workers=1", "learn.kl_coef=0.01", "speculation.mode=plain", f"run_dir={tmp_path / 'run'}"]
    config = load_config(None, words + more)
    _, rows = train(config, None, LiveView(config))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step"))
    row = rows[0]
    assert f"mixed {row['groups/mixed']:.0%}" in line and f"cut {row['response_length/clip_ratio']:.0%}" in line
    assert f"entropy {row['actor/entropy']:.2f}" in line and f"grad {row['actor/grad_norm']:.2f}" in line
    assert f"KL {row['actor/kl_loss']:.4f}" in line
    page = write_report(tmp_path / "run")[0].read_text()
    assert 'data-metric="actor/entropy"' in page and 'data-metric="actor/grad_norm"' in page
    assert 'data-metric="groups/mixed"' in page and 'data-metric="actor/kl_loss"' in page
