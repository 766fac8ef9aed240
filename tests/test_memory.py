"""The memory plan: its parts are what the parts take, and what does not fit is said before the run starts."""

from __future__ import annotations

import pytest
import torch

from paceline.config import load_config
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.errors import UserError
from paceline.learn.algorithms import resolve
from paceline.learn.learner import Learner
from paceline.model import DecoderConfig, load_model
from paceline.model.attention import PackedAttention
from paceline.model.checkpoint import EMBEDDED, read_config
from paceline.rollout import RolloutEngine
from paceline.rollout.pages import affordable_pages
from paceline.setup.build import engine_settings, make_drafter
from paceline.setup.machine import machine_memory
from paceline.setup.memory import DeviceMemory, check_fit, filled, plan_memory

from .conftest import tiny_model
from .test_cli import here

SEVEN = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip
H200 = DeviceMemory("one H200", 150 * 10**9, True)
LONG = [
    "rollout.max_tokens=8192", "task.max_prompt_tokens=512", "speculation.drafter=new", "spot.when='off'",
    "cluster.workers=1",
]  # fmt: skip


def settings(*words: str):
    return resolve(load_config(None, list(words)))


def bytes_of(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_a_7b_fits_one_h200_by_settings_and_only_by_settings():
    shape = DecoderConfig.from_hf(SEVEN)
    again = lambda config: plan_memory(config, shape, H200)  # noqa: E731
    config = settings(*LONG, "learn.micro_tokens=16384")
    plan = again(config)
    assert not plan.fits and plan.parts["optimizer"] == 12 * plan.parts["weights"] // 2
    with pytest.raises(UserError) as said:
        check_fit(plan, config, again)
    text = str(said.value)
    assert "learn.activation_checkpointing=true" in text and "one H200 has 150.0" in text and "\n" not in text
    half = again(settings(*LONG, "learn.optimizer_dtype=bfloat16", "learn.activation_checkpointing=true"))
    check_fit(half, config, again)
    assert half.parts["optimizer"] == 4 * half.parts["weights"] and half.total <= H200.bytes
    assert half.kv_tokens > 200_000, "room for the tail of 128 answers"
    two = plan_memory(settings(*LONG, "learn.optimizer_dtype=bfloat16", "learn.activation_checkpointing=true"),
                      shape, H200, engines=2)  # fmt: skip
    assert two.fits and two.kv_tokens < half.kv_tokens


def test_what_cannot_fit_is_told_as_that():
    shape = DecoderConfig.from_hf(SEVEN)
    small = DeviceMemory("a small card", 24 * 10**9, True)
    again = lambda config: plan_memory(config, shape, small)  # noqa: E731
    config = settings(*LONG)
    with pytest.raises(UserError, match="take a smaller model or a larger device"):
        check_fit(again(config), config, again)


def test_a_smaller_card_takes_the_same_recipe_by_settings():
    shape = DecoderConfig.from_hf(SEVEN | {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2,
                                           "intermediate_size": 8960, "tie_word_embeddings": True})  # fmt: skip
    card = DeviceMemory("a card of 40 GB", 40 * 10**9, True)
    again = lambda config: plan_memory(config, shape, card)  # noqa: E731
    assert not again(settings(*LONG)).fits
    plan = again(settings(*LONG, "learn.activation_checkpointing=true", "rollout.max_batch=32"))
    assert plan.fits and plan.total <= card.bytes


def test_the_parts_are_what_they_take():
    """Everything that has a known size, against the tensors themselves."""
    config = settings("cluster.workers=1", "spot.when='off'", "learn.kl_coef=0.1", "rollout.max_batch=8")
    model = load_model("embedded")
    plan = plan_memory(config, model.config, DeviceMemory("here", 10**11, False))
    learner = Learner(model, config)
    drafter = make_drafter(model, config)
    assert drafter is not None and learner.reference is not None
    engine = RolloutEngine(model, engine_settings(config, model.device), None, [EagleDrafter(drafter)])
    parts = plan.parts
    assert parts["weights"] == parts["gradients"] == bytes_of(model.parameters())
    assert parts["optimizer"] == sum(bytes_of(learner.optimizer.tensors(n)) for n in learner.optimizer.mean)
    assert parts["reference"] == bytes_of(learner.reference.parameters())
    taken = bytes_of(drafter.parameters()) + engine.drafters["neural"].memory_bytes
    assert parts["drafter"] == pytest.approx(taken, rel=0.3)
    assert parts["KV pages"] == pytest.approx(bytes_of([engine.pool.k, engine.pool.v]), rel=0.01)
    assert plan.kv_tokens == engine.pool.pages * engine.pool.page_size


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_what_autograd_keeps(recompute):
    from paceline.learn.logprobs import _recomputed
    from paceline.learn.memory import activation_elements

    model = tiny_model(dtype=torch.float32, num_hidden_layers=6).requires_grad_(True)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(0, 128, (256,))
    attention = PackedAttention([128, 128], tokens.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run = _recomputed if recompute else None
        hidden, _ = model(tokens, attention.positions(), attention, run=run)
    assert hidden.requires_grad
    planned = 4 * activation_elements(model.config, 256, recompute)
    # What it plans for beyond that is the layer that the backward pass is in.
    assert sum(kept.values()) < planned < (2.0 if not recompute else 6.0) * sum(kept.values())


def test_kv_pages_get_what_is_left():
    shape = DecoderConfig.from_hf(SEVEN)
    words = [*LONG, "learn.optimizer_dtype=bfloat16", "learn.activation_checkpointing=true"]
    config = settings(*words)
    plan = plan_memory(config, shape, H200)
    planned = filled(config, plan).rollout.kv_memory_gb
    assert planned == pytest.approx(plan.kv_bytes / 1e9) and plan.total <= H200.bytes
    chosen = settings(*words, "rollout.kv_memory_gb=10")
    assert plan_memory(chosen, shape, H200).parts["KV pages"] == pytest.approx(10e9)
    assert filled(chosen, plan) == chosen, "a setting stays what it is"
    shared = plan_memory(chosen, shape, DeviceMemory("half", 300 * 10**9, True, sharing=2), workers=2)
    assert shared.parts["KV pages"] == pytest.approx(20e9)


def test_the_machine_has_memory():
    plan = plan_memory(
        settings("cluster.workers=2"), read_config(EMBEDDED), DeviceMemory("here", machine_memory(), False, 2)
    )
    assert plan.fits and 0 < plan.total < 10**10


def test_plan_is_shown_and_training_says_it(tmp_path, capsys):
    assert here("plan") == 0
    shown = capsys.readouterr().out
    assert "KV pages" in shown and "learn.micro_tokens" in shown and "this machine" in shown
    assert here("plan", "--compare", "cluster.workers=1") == 0
    capsys.readouterr()
    quick = ["steps=1", "rollout.prompts=1", "rollout.samples=2", "rollout.max_tokens=8", "cluster.workers=1"]
    assert here("train", *quick, "log.tensorboard=false", f"run_dir={tmp_path / 'run'}") == 0
    assert "\nmemory: " in capsys.readouterr().out


def test_what_does_not_fit_is_refused_before_it_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("paceline.setup.memory.machine_memory", lambda: 10**8)
    assert here("train", "cluster.workers=1", f"run_dir={tmp_path / 'run'}") == 2
    said = capsys.readouterr().err
    assert "this run needs about" in said and "this machine has 0.1" in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_more_memory_for_pages_than_the_machine_has_is_refused(tmp_path, capsys, monkeypatch):
    """Although pages take no more than the batch can use, so that the plan itself would fit."""
    monkeypatch.setattr("paceline.setup.memory.machine_memory", lambda: 24 * 10**9)
    for words, problem in {
        "rollout.kv_memory_gb=500": "rollout.kv_memory_gb = 500 is more than this machine has, 24.0 GB; lower it",
        "speculation.suffix_mb=30000": "suffix_mb = 30000, 31.5 GB for every worker, is more than this machine has",
        "spot.buffer_mb=30000": "spot.buffer_mb = 30000, 31.5 GB for every worker, is more than this machine has, 24.0",
    }.items():
        assert here("train", "cluster.workers=1", words, f"run_dir={tmp_path / 'run'}") == 2
        said = capsys.readouterr().err
        assert problem in said and said.count("\n") == 1
        assert not (tmp_path / "run").exists()
    assert here("plan", "cluster.workers=2", "rollout.kv_memory_gb=20") == 2
    assert "= 20 for each of 2 engines is more than" in capsys.readouterr().err


def test_pages_of_an_engine_without_a_plan_fit_into_the_machine(monkeypatch):
    monkeypatch.setattr("paceline.rollout.pages.machine_memory", lambda: 10**9)
    cpu = torch.device("cpu")
    assert affordable_pages(500, 10**6, 2 * 10**9, cpu) == 500, "what is not wanted is not taken"
    with pytest.raises(UserError, match=r"KV pages would take 1\.5 GB, but this machine has 1 GB"):
        affordable_pages(1500, 10**6, 2 * 10**9, cpu)
