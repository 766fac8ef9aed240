"""The long forms of `test_vllm_rollout.py`, where the environment of `make test-vllm` is there."""

from __future__ import annotations

import signal

import pytest
from scipy import stats

from .runs_with_vllm import WeightCheck, new_run, worker_of
from .test_vllm import PYTHON
from .test_vllm_rollout import REASONER, check_weights, lose_engine_in

pytestmark = [pytest.mark.soak, pytest.mark.skipif(not PYTHON.exists(), reason="make test-vllm makes its environment")]

OTHER_NOISE = ["rollout.vllm={enforce_eager: true, additional_config: {}}", "speculation.mode=plain"]
"""vLLM's own."""


def test_rewards_follow_the_law_of_our_engines(tmp_path):
    """Two runs from the same policy over the same prompts, with vLLM's own noise, so that completions differ: their
    rewards are compared step by step, and all together."""
    words = [*REASONER, "steps=12", "rollout.prompts=8", "learn.lr=1e-4", "model.dtype=float32", "rollout.samples=8"]
    runs = {}
    for name, own in (("vllm", False), ("ours", True)):
        loop, _ = new_run(tmp_path / name, *words, *([] if own else OTHER_NOISE), own=own)
        check = WeightCheck(loop)
        runs[name] = [row["critic/rewards/mean"] for row in loop.train()]
        check_weights(check, 12, by=1e-3)
    assert stats.ttest_rel(runs["vllm"], runs["ours"]).pvalue > 0.001
    assert abs(sum(runs["vllm"]) - sum(runs["ours"])) / 12 < 0.1


def test_an_engine_that_hangs_is_started_again(tmp_path):
    loop, view = new_run(
        tmp_path / "run", *REASONER, "steps=2", "rollout.prompts=2", "model.dtype=float32", "cluster.timeout_s=90"
    )
    lose_engine_in(2, loop, view, signal.SIGSTOP)
    assert len(loop.train()) == 2
    assert any("it said nothing for 9" in sentence and "started again" in sentence for sentence in view.said)
    assert worker_of(loop) is None, "closed"
