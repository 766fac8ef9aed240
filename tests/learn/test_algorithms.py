"""An RL algorithm is one file and one line in `ALGORITHMS`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from paceline.config import load_config
from paceline.errors import UserError
from paceline.learn.algorithms import ALGORITHMS, resolve
from paceline.learn.learner import Learner
from paceline.loop import train

from ..conftest import tiny_model
from . import max_baseline
from .test_learner import make_trajectories
from .updates import update

WORDS = ["learn.algorithm=max_baseline", "rollout.samples=4", "learn.lr=1e-3"]


def test_an_algorithm_is_one_file_and_one_line(monkeypatch):
    with pytest.raises(UserError, match="'grpo', 'dr_grpo', 'dapo', 'rloo', 'reinforce_pp'"):
        load_config(None, WORDS)
    monkeypatch.setitem(ALGORITHMS, "max_baseline", max_baseline.ALGORITHM)
    config = resolve(load_config(None, [*WORDS, "learn.aggregate=null", "learn.overlong_buffer=0"]))
    assert config.learn.aggregate == "token_mean" and config.learn.clip_high == 0.3

    model = tiny_model()
    trajectories = make_trajectories(model=model)
    for i, trajectory in enumerate(trajectories):
        trajectory.reward = float(i % 4 == 1)  # the best of each group is its second
    learner = Learner(model, config)
    batch = learner.make_batch(trajectories, 0, learner.score(trajectories, range(8)))
    assert [set(a.tolist()) for a in batch.advantages] == [{0.0 if i % 4 == 1 else -1.0} for i in range(8)]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    metrics = update(learner, trajectories, 0)
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/skipped"] == 0
    assert any(not torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_run_trains_with_it(monkeypatch, tmp_path):
    monkeypatch.setitem(ALGORITHMS, "max_baseline", max_baseline.ALGORITHM)
    words = "steps=1 rollout.prompts=4 rollout.max_tokens=40 cluster.workers=1 speculation.drafter=none "
    words += f"task.difficulty=easy log.tensorboard=false run_dir={tmp_path / 'run'}"
    run, (row,) = train(load_config(None, [*WORDS, *words.split()]))
    assert run.config.learn.algorithm == "max_baseline" and row["actor/skipped"] == 0


def test_settings_are_checked_without_torch():
    code = "import sys, paceline.config as c; c.load_config(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
