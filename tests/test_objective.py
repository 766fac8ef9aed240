"""Defaults are neutral and the same from the command and from Python, and one line says what shapes learning."""

from __future__ import annotations

import json

import pytest

from paceline import Trainer
from paceline.config import Config, load_config
from paceline.learn.algorithms import resolve
from paceline.setup.objective import objective_line

from .test_cli import here
from .tied import make_tied

CASES = {
    "neutral": ([], "learning: grpo, lr 1e-06, no KL, no penalty, max_tokens 512, 16 prompts x 8"),
    "dapo": (
        ["learn.algorithm=dapo", "rollout.max_tokens=1000", "rollout.temperature=0.7"],
        "learning: dapo with dynamic sampling, lr 1e-06, no KL, penalty to -1 from 800 tokens on, max_tokens 1000, "
        "16 prompts x 8, temperature 0.7",
    ),
    "KL": (
        ["learn.kl_coef=0.05", "learn.lr_scheduler=cosine", "rollout.max_tokens=5000"],
        "learning: grpo, lr 1e-06 cosine, KL 0.05, no penalty, max_tokens 5000, of which 4000 fit behind the first "
        "prompt in a context of 4096, 16 prompts x 8",
    ),
    "a penalty of 0": (
        ["learn.overlong_buffer=100", "learn.overlong_penalty=0"],
        "learning: grpo, lr 1e-06, no KL, no penalty, max_tokens 512, 16 prompts x 8",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_line(case):
    words, line = CASES[case]
    config = resolve(load_config(None, ["model.path=mine", *words]))
    assert objective_line(config, context=4096, prompt=96) == line
    assert len(CASES["neutral"][1]) < 80


def test_it_stands_at_the_start(tmp_path, capsys):
    make_tied(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "1 + 1 ="}) + "\n")
    small = [
        "steps=1",
        "rollout.prompts=2",
        "rollout.samples=2",
        "log.tensorboard=false",
        f"run_dir={tmp_path / 'run'}",
    ]
    own = [f"model.path={tmp_path / 'model'}", f"task.name={tmp_path / 'data.jsonl'}", "speculation.mode=plain"]
    assert here("train", *small, *own, "reward.functions=[{function: 'builtins:len'}]") == 2
    reward = tmp_path / "mine.py"
    reward.write_text("def f(completions, **_): return [float(len(c)) for c in completions]")
    capsys.readouterr()
    assert here("train", *small, *own, f"reward.functions=[{{function: '{reward}:f'}}]") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("learning:")]
    fits = 512 - len("1 + 1 =")
    assert line == (
        f"learning: grpo, lr 1e-06, no KL, no penalty, max_tokens 512, of which {fits} fit behind the first prompt in "
        "a context of 512, 2 prompts x 2"
    )


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ({}, []),
        ({"settings": {"task.difficulty": "tail"}}, ["task.difficulty=tail"]),
        ({"data": "data.jsonl"}, ["task.name=data.jsonl"]),
        ({"model": "mine"}, ["model.path=mine"]),
        ({"model": "mine", "recipe": "default"}, ["model.path=mine"]),
        ({"data": [{"prompt": "x"}]}, ["task.name=data"]),
        ({"recipe": "dapo-math-7b"}, []),
        ({"recipe": "dapo-math-7b", "model": "mine"}, ["model.path=mine"]),
        ({"model": "embedded", "data": "countdown"}, []),
        ({"settings": {"model.path": "mine"}}, ["model.path=mine"]),
    ],
)
def test_python_and_the_command_have_the_same_defaults(python, words):
    assert Trainer(**python).config == load_config(python.get("recipe"), words)


def test_only_the_demo_has_settings_of_its_own():
    assert Trainer(model="mine").config.learn == Trainer(data="x.jsonl").config.learn == Config().learn
    assert Trainer().config.learn != Config().learn
