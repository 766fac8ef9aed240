"""Models of families that our decoder does not run, as the learner has them: the same update as our decoder's where
both run a model, and weights that come and go by the names of their checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, Phi3Config, Qwen2MoeConfig

from paceline.config import build_config
from paceline.errors import UserError
from paceline.learn.learner import Learner
from paceline.learn.state import load_learner, save_learner
from paceline.model.checkpoint import layout, load_model, read_any_config, save_model
from paceline.model.foreign import PADDED, ForeignModel, foreign_layout, load_foreign, save_foreign, similar
from paceline.model.foreign_config import ForeignConfig, foreign_config
from paceline.setup.engines import check_foreign, load_policy_model

from ..conftest import tiny_model
from .test_learner import config, make_trajectories
from .updates import update

BASE = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 256, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "intermediate_size": 64,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}  # fmt: skip
FAMILIES = {
    "qwen2_moe": lambda: Qwen2MoeConfig(**BASE, **EXPERTS, tie_word_embeddings=False),
    "gemma2": lambda: Gemma2Config(**BASE, head_dim=16, query_pre_attn_scalar=16),  # tied, with a soft cap on logits
    "phi3": lambda: Phi3Config(**BASE, tie_word_embeddings=False),
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(FAMILIES[request.param]()).save_pretrained(path)
    return path


def load(path, dtype="float32", recompute=False) -> ForeignModel:
    shape = read_any_config(path)
    assert isinstance(shape, ForeignConfig)
    return load_foreign(str(path), shape, dtype, "cpu", recompute)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_update_is_that_of_our_decoder(tmp_path, recompute):
    """A Llama as both have it: log-probabilities, loss, gradient norm and weights after two updates."""
    ours = tiny_model("llama")
    save_model(ours, tmp_path)
    shape = foreign_config(json.loads((tmp_path / "config.json").read_text()), tmp_path)
    theirs = load_foreign(str(tmp_path), shape, "float64", "cpu", recompute)
    settings = config(activation_checkpointing=recompute, micro_tokens=100)
    trajectories = make_trajectories(8, model=ours)
    learners = [Learner(ours, settings), Learner(theirs, settings)]
    for one, other in zip(*(learner.logprobs(trajectories) for learner in learners), strict=True):
        assert torch.allclose(one, other, atol=1e-5)  # rotary angles are float32 in transformers
    for step in range(2):
        mine, other = (update(learner, trajectories, step) for learner in learners)
        assert mine["actor/grad_norm"] > 0
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "rollout_corr/kl"):
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5)
    after = foreign_layout(theirs)
    assert after.keys() == dict(layout(ours)).keys()
    for name, tensor in layout(ours):
        # AdamW's first steps are as large for a gradient that is nearly nothing, which rounding gives another sign.
        assert float((tensor - after[name]).abs().mean()) < 0.01 * settings.learn.lr, name


def test_weights_go_out_by_the_names_of_the_checkpoint(folder):
    stored = load_file(folder / "model.safetensors")
    out = foreign_layout(load(folder))
    assert out.keys() == stored.keys(), "each expert by itself, tied embeddings once"
    assert all(torch.equal(out[name], tensor) for name, tensor in stored.items())


def test_an_update_changes_what_goes_out_and_a_checkpoint_keeps_it(folder, tmp_path):
    model = load(folder, recompute=True)
    before = {name: tensor.clone() for name, tensor in foreign_layout(model).items()}
    learner = Learner(model, config(micro_tokens=64))
    trajectories = make_trajectories(8)
    liked = [t for t in trajectories if t.reward > 0]
    likely = sum(float(x.sum()) for x in learner.logprobs(liked))
    for step in range(3):
        update(learner, trajectories, step)
    assert sum(float(x.sum()) for x in learner.logprobs(liked)) > likely, "what was rewarded is more likely now"
    after = foreign_layout(model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert len(changed) > 0.9 * len(after)

    save_foreign(model, tmp_path)
    save_learner(learner, tmp_path, 0, learner.optimizer.mean, reference=True)
    again = Learner(load(tmp_path), config(micro_tokens=64))
    load_learner(again, tmp_path)
    assert again.updates == 3
    assert all(torch.equal(a, b) for a, b in zip(again.logprobs(liked), learner.logprobs(liked), strict=True))
    one, other = (update(each, trajectories, 3) for each in (learner, again))
    assert one["actor/pg_loss"] == pytest.approx(other["actor/pg_loss"], abs=1e-6)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40))
def test_sequences_run_together_that_are_of_similar_length(lengths):
    parts = list(similar(lengths))
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        some = [lengths[i] for i in part]
        assert len(part) == 1 or len(part) * max(some) <= PADDED * sum(some)


def test_our_decoder_is_taken_where_it_runs_the_family(tmp_path, folder):
    save_model(tiny_model("qwen3"), tmp_path)
    settings = build_config({"rollout": {"engine": "vllm"}, "model": {"dtype": "float32"}}, "test")
    assert not isinstance(load_policy_model(settings, str(tmp_path), "cpu"), ForeignModel)
    assert isinstance(load_policy_model(settings, str(folder), "cpu"), ForeignModel)
    own = build_config({"model": {"dtype": "float32"}}, "test")
    with pytest.raises(UserError, match=r"which Paceline does not run.*rollout.engine=vllm"):
        load_policy_model(own, str(folder), "cpu")
    with pytest.raises(UserError, match="does not run"):
        load_model(str(folder))


@pytest.mark.parametrize(
    "settings",
    [{"learn": {"lora": {"rank": 4}}}, {"speculation": {"drafter": "new"}}, {"spot": {"when": "update"}}],
)
def test_what_only_our_decoder_can_do_is_refused_by_name(folder, settings):
    shape = read_any_config(folder)
    (section,) = settings
    with pytest.raises(UserError, match=rf"{section}.*does not work with a model of the family '{shape.family}'"):
        check_foreign(build_config(settings, "test"), shape)


def test_a_damaged_model_is_refused_in_a_sentence(folder, tmp_path):
    hf = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(UserError, match="transformers cannot load the model"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf | {"vocab_size": -1}))
    with pytest.raises(UserError, match="vocab_size"):
        read_any_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match="quantized"):
        read_any_config(tmp_path)
