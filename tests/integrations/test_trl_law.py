"""With and without the two lines: as many completions, in the same order, and rewards that follow the same law."""

from __future__ import annotations

import argparse

import pytest
import torch
from benchmarks.trl_rollout import LEVEL, run, same_law, same_mean
from scipy import stats

from paceline.integrations.trl import PacelineRollout
from tests.integrations.grpo import Reward, data, make

SAMPLES = 6


def test_same_law(tmp_path):
    """One batch by TRL and by Paceline from the same weights, over two seeds: rewards prompt by prompt, and lengths."""
    rows = data(8)
    prompts = [row["prompt"] for row in rows for _ in range(SAMPLES)]
    columns = {name: [row[name] for row in rows for _ in range(SAMPLES)] for name in ("numbers", "target")}
    rewards: list[list[list[float]]] = [[], []]
    lengths: list[list[int]] = [[], []]
    for seed in (1, 2):
        rollout = PacelineRollout()
        beside = ({}, {"rollout_func": rollout, "callbacks": [rollout]})
        for engine in range(2):
            trainer = make(tmp_path, Reward(), seed=seed, max_completion_length=48, **beside[engine])
            trainer.model.train()
            _, completions, _, texts, *_ = trainer._generate(prompts)
            assert len(completions) == len(prompts)
            rewards[engine].append(Reward()(prompts, texts, **columns))
            lengths[engine] += [len(tokens) for tokens in completions]
    assert 0.2 < torch.tensor(rewards).mean() < 0.8, "there is something to tell apart"
    assert same_law(*rewards, SAMPLES) > LEVEL
    assert stats.ks_2samp(*lengths).pvalue > LEVEL
    rollout = PacelineRollout(settings={"speculation.mode": "plain"})
    hot = make(tmp_path, Reward(), temperature=3.0, max_completion_length=48, rollout_func=rollout, callbacks=[rollout])
    other = [len(tokens) for tokens in hot._generate(prompts)[1]]
    assert stats.ks_2samp(lengths[0], other).pvalue < LEVEL, "another temperature is told apart"


def test_another_law_is_told_apart():
    assert same_law([[1.0, 1.0, 0.0, 1.0] * 8], [[0.0, 0.0, 1.0, 0.0] * 8], 4) < LEVEL
    assert same_mean([0.5, 0.6, 0.55, 0.62], [0.2, 0.31, 0.24, 0.3]) < LEVEL


@pytest.mark.soak
def test_whole_runs_follow_the_same_law():
    """The script with updates, six seeds of four steps."""
    options = {
        "model": "embedded", "drafter": "auto", "share": None, "steps": 4, "prompts": 8, "samples": 4, "accumulate": 1,
        "tokens": 96, "lr": 5e-5,
    }  # fmt: skip
    rows = data(32, "easy")
    pairs = [[run(argparse.Namespace(**options), seed, ours, rows) for ours in (False, True)] for seed in range(6)]
    assert all(theirs.prompts == ours.prompts for theirs, ours in pairs)
    first = [[pair[engine].rewards[0] for pair in pairs] for engine in range(2)]
    whole = [[sum(r) / len(r) for pair in pairs for r in pair[engine].rewards] for engine in range(2)]
    assert same_law(*first, 4) > LEVEL
    assert same_mean(*whole) > LEVEL
