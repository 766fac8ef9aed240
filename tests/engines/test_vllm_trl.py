"""TRL's trainer with vLLM behind `PacelineRollout(engine="vllm")`: what the engine says of its answers is what the
trainer's own model says, before and after updates."""

from __future__ import annotations

import pytest
import torch

from paceline.integrations.trl import PacelineRollout

from ..integrations.grpo import Reward, data, make
from .test_vllm import PYTHON

pytestmark = pytest.mark.vllm


@torch.no_grad()
def largest_difference(trainer, out) -> float:
    found = []
    for prompt, answer, logprobs in zip(out["prompt_ids"], out["completion_ids"], out["logprobs"], strict=True):
        text = torch.tensor([prompt + answer])
        own = trainer._get_per_token_logps_and_entropies(trainer.model, text, torch.ones_like(text), len(answer))[0][0]
        found.append(float((own.double() - torch.tensor(logprobs, dtype=torch.float64)).abs().max()))
    return max(found)


def test_answers_are_those_of_the_trainers_model(tmp_path):
    settings = {"rollout.vllm_python": str(PYTHON), "rollout.vllm": {"enforce_eager": True, "max_model_len": 400}}
    rollout = PacelineRollout(engine="vllm", settings=settings)
    trainer = make(tmp_path, reward := Reward(), rollout_func=rollout, callbacks=[rollout], temperature=0.8)
    trainer.train()
    assert len(reward.values) == 16 and set(map(bool, reward.values)) <= {True, False}
    logged = [row for row in trainer.state.log_history if "paceline/tokens_per_s" in row]
    assert len(logged) == 2 and all(row["paceline/rollout_s"] > 0 for row in logged)

    trainer.model.train()
    prompts = [row["prompt"] for row in data(3) for _ in range(2)]
    out = rollout(prompts, trainer)
    assert [trainer.processing_class.decode(ids) for ids in out["prompt_ids"]] == prompts
    assert largest_difference(trainer, out) < 1e-4
    before = rollout(prompts, trainer)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.05)
    assert largest_difference(trainer, before) > 1e-2, "it is another model now"
    assert largest_difference(trainer, rollout(prompts, trainer)) < 1e-4
    assert (tmp_path / "vllm.log").is_file()
