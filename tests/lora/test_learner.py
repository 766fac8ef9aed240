"""The learner with adapters: how its work is cut changes nothing, and only adapters have gradients and state."""

from __future__ import annotations

import pytest
import torch

from paceline.learn.learner import Learner
from paceline.lora.adapters import Lora
from paceline.lora.shape import LoraShape

from ..conftest import tiny_model
from ..learn.test_learner import config, make_trajectories
from ..learn.updates import update

SHAPE = LoraShape(4, 8.0, ("q_proj", "v_proj", "o_proj", "up_proj"))


def make(family: str = "qwen3", **learn: object) -> Learner:
    lora = Lora(tiny_model(family), SHAPE, seed=1)
    for name, parameter in lora.parameters.items():
        parameter.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    lora.merge()
    return Learner(lora.model, config(**learn), lora=lora)


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    trajectories = make_trajectories(model=tiny_model(learner.model.config.family))
    batch = learner.make_batch(trajectories, 0, learner.score(trajectories, range(len(trajectories))))
    learner.gradients(batch, 0, batch.updates[0])
    return {name: parameter.grad for name, parameter in learner.parameters.items()}


@pytest.mark.parametrize(
    "change", [{"micro_tokens": 40}, {"micro_tokens": 1}, {"activation_checkpointing": True}], ids=str
)
def test_how_the_batch_is_cut_changes_nothing(change):
    base = gradients(make(kl_coef=0.1))
    cut = gradients(make(kl_coef=0.1, **change))
    for name, grad in base.items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(cut[name], grad, rtol=1e-8, atol=1e-12)


def test_gradients_follow_from_those_of_all_weights():
    """dA = s B^T dW and dB = s dW A^T, with dW as training all weights makes it."""
    learner = make()
    whole = Learner(make().model, config())
    for layer in whole.model.layers:
        layer.adapted = {}
    theirs, ours = gradients(whole), gradients(learner)
    for part in SHAPE.parts(learner.model.config):
        weight = theirs[f"layers.{part.layer}.{part.fused}"][part.start : part.start + part.rows]
        a, b = (learner.parameters[f"{part.name}.lora_{x}.weight"] for x in "AB")
        torch.testing.assert_close(ours[f"{part.name}.lora_A.weight"], 2.0 * b.t() @ weight, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(ours[f"{part.name}.lora_B.weight"], 2.0 * weight @ a.t(), rtol=1e-8, atol=1e-12)


def test_an_update_changes_the_adapters_and_then_the_weights():
    learner = make()
    base = [p.clone() for p in tiny_model("qwen3").parameters()]
    merged = [p.detach().clone() for p in learner.model.parameters()]
    before = {name: p.detach().clone() for name, p in learner.parameters.items()}
    update(learner, make_trajectories(model=learner.model), step=0)
    assert all(not torch.equal(p, before[name]) for name, p in learner.parameters.items())
    assert all(map(torch.equal, learner.model.parameters(), merged)), "not before it is published"
    learner.publish()
    assert not all(map(torch.equal, learner.model.parameters(), merged))
    assert learner.optimizer.mean.keys() == learner.parameters.keys() and not learner.optimizer.master
    assert all(p.grad is None and not p.requires_grad for p in learner.model.parameters())
    learner.lora.restore()
    assert all(map(torch.equal, learner.model.parameters(), base))


def test_bfloat16_weights_follow_small_updates_of_the_adapters():
    """Updates that each change no bit of a bfloat16 weight add up in A and B, as they do in master weights."""
    lora = Lora(tiny_model("llama", dtype=torch.bfloat16), LoraShape(2, 2.0, ("down_proj",)))
    down = lora.model.layers[0].down
    before = down.detach().clone()
    b = lora.parameters["model.layers.0.mlp.down_proj.lora_B.weight"]
    moved = []
    for _ in range(200):
        b.data.add_(1e-5)
        lora.merge()
        moved.append(int((down != before).sum()))
    assert moved[0] < 0.05 * down.numel() < 0.3 * down.numel() < moved[-1]
