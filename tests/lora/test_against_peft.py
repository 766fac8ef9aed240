"""LoRA computes what PEFT computes: the forward pass, the gradients, the files."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from paceline.config.training import TARGETS
from paceline.core import Request, SamplingParams
from paceline.lora.adapters import Lora, pair_names
from paceline.lora.files import PREFIX, read_adapter, read_lora_shape, save_adapter
from paceline.lora.shape import LoraShape
from paceline.model import load_model
from paceline.model.attention import PackedAttention
from paceline.rollout.engine import EngineSettings, RolloutEngine

from ..conftest import tiny_model
from .peft_pair import VARIANTS, logits, ours_of, peft_pair, theirs_logits

TOKENS = torch.randint(2, 128, (40,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_and_gradients(variant, tmp_path):
    compare(*peft_pair(tmp_path, variant))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("targets", [TARGETS, ("k_proj", "gate_proj", "o_proj")], ids=str)
def test_gradients_are_those_of_the_formula(family, targets):
    """In float64, with W = W0 + s B A left to autograd."""
    lora = Lora(tiny_model(family), LoraShape(4, 6.0, targets))
    for parameter in lora.parameters.values():
        parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(parameter.numel()))
        parameter.requires_grad_(True)
    lora.merge()
    plain = tiny_model(family)
    weights = dict(plain.named_parameters())
    for part in lora.shape.parts(plain.config):
        a, b = (lora.parameters[name] for name in pair_names(part.name))
        delta = torch.zeros_like(plain.layers[part.layer].get_parameter(part.fused))
        delta[part.start : part.start + part.rows] = 1.5 * b @ a
        weights[f"layers.{part.layer}.{part.fused}"] = weights[f"layers.{part.layer}.{part.fused}"] + delta
    attention = PackedAttention([15, 25], TOKENS.device)
    inputs = (TOKENS, attention.positions(), attention)
    expected = torch.func.functional_call(plain, weights, inputs)[0]
    got = lora.model(*inputs)[0]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    some = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = list(lora.parameters.values())
    theirs = torch.autograd.grad((expected * some).sum(), parameters)
    ours = torch.autograd.grad((got * some).sum(), parameters)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj"], ["o_proj", "up_proj", "down_proj"]], ids=str)
def test_some_targets(targets, tmp_path):
    theirs, lora = peft_pair(tmp_path, "qwen2", targets)
    assert lora.shape.targets == tuple(targets)
    compare(theirs, lora)


def test_rank_stabilised_scaling(tmp_path):
    theirs, lora = peft_pair(tmp_path, "llama", r=9, use_rslora=True)
    assert lora.shape.alpha == 8 * 3
    compare(theirs, lora)


def close(a: torch.Tensor, b: torch.Tensor, most: float) -> bool:
    """Whether no number differs by more than so many times the largest one."""
    return bool((a - b).abs().max() <= most * b.abs().max())


def compare(theirs: torch.nn.Module, lora: Lora) -> None:
    weights = torch.randn(len(TOKENS), 128, generator=torch.Generator().manual_seed(4)) / len(TOKENS)
    expected = theirs_logits(theirs, TOKENS)
    with theirs.disable_adapter():
        assert (theirs_logits(theirs, TOKENS) - expected).abs().max() > 0.1, "the adapters do something"
    for parameter in lora.parameters.values():
        parameter.requires_grad_(True)
    got = logits(lora.model, TOKENS)
    assert got.dtype == expected.dtype and close(got, expected, 1e-5)
    (weights * expected.log_softmax(-1)).sum().backward()
    (weights * got.log_softmax(-1)).sum().backward()
    grads = {n.replace(".default", "").removeprefix(PREFIX): p.grad for n, p in theirs.named_parameters()}
    for name, parameter in lora.parameters.items():
        assert close(parameter.grad, grads[name], 1e-5), name
        assert grads[name].abs().max() > 1e-4
    assert all(p.grad is None for p in lora.model.parameters()), "gradients go to the adapters only"


@pytest.mark.parametrize("variant", ["qwen2", "qwen3-tied"])
def test_the_rollout_has_the_law_of_the_adapter(variant, tmp_path):
    """Log-probabilities that the engine reports with merged weights are those of PEFT's model, unmerged."""
    theirs, lora = peft_pair(tmp_path, variant)
    engine = RolloutEngine(lora.model, EngineSettings(max_batch=4))
    sampling = SamplingParams(max_tokens=30, stop_token_ids=())
    for done in engine.run([Request(i, tuple(range(5 + i, 12 + i)), sampling, 7) for i in range(4)]):
        tokens = torch.tensor([*done.request.prompt, *done.tokens])
        with torch.no_grad():
            logp = theirs_logits(theirs, tokens).log_softmax(-1)
        first = len(done.request.prompt) - 1
        expected = logp[first:-1].gather(-1, tokens[first + 1 :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, rtol=1e-5, atol=1e-5)


def test_what_is_saved_loads_in_peft_and_comes_back(tmp_path):
    _, lora = peft_pair(tmp_path, "qwen3-tied", ["q_proj", "down_proj"])
    save_adapter(lora, tmp_path / "saved", str(tmp_path / "base"))
    theirs, ours = (load_file(tmp_path / at / "adapter_model.safetensors") for at in ("adapter", "saved"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base") and config["r"] == 4
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "saved")
    with torch.no_grad():
        torch.testing.assert_close(theirs_logits(loaded, TOKENS), logits(lora.model, TOKENS), rtol=1e-5, atol=1e-5)
    again = Lora(load_model(str(tmp_path / "base")), read_lora_shape(tmp_path / "saved"))
    again.load(read_adapter(tmp_path / "saved", again))
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), lora.model.parameters(), strict=True))


def test_fresh_adapters_change_nothing_and_begin_as_pefts_do(tmp_path):
    peft_pair(tmp_path)
    model = load_model(str(tmp_path / "base"))
    before = logits(model, TOKENS)
    lora = Lora(model, LoraShape(64, 128, ("q_proj", "down_proj")), seed=5)
    lora.merge()
    assert torch.equal(logits(model, TOKENS), before)
    a = lora.parameters["model.layers.0.mlp.down_proj.lora_A.weight"]
    assert a.shape == (64, 96) and a.abs().max() <= 96**-0.5
    assert a.std() == pytest.approx((1 / 3 / 96) ** 0.5, rel=0.05), "uniform"
    assert not any(p.any() for name, p in lora.parameters.items() if "lora_B" in name)
    other = Lora(load_model(str(tmp_path / "base")), lora.shape, seed=5)
    assert all(torch.equal(p, other.parameters[name]) for name, p in lora.parameters.items()), "the same seed"
    assert not torch.equal(a, Lora(model, lora.shape, seed=6).parameters["model.layers.0.mlp.down_proj.lora_A.weight"])


def test_gradients_in_bfloat16_point_where_float32s_do(tmp_path):
    peft_pair(tmp_path, "qwen2")
    wide, narrow = ours_of(tmp_path), ours_of(tmp_path, "bfloat16")
    for lora in (wide, narrow):
        for parameter in lora.parameters.values():
            assert parameter.dtype == torch.float32
            parameter.requires_grad_(True)
        logits(lora.model, TOKENS).float().log_softmax(-1)[:, 5].mean().backward()
    one, two = (torch.cat([p.grad.flatten() for p in lora.parameters.values()]) for lora in (wide, narrow))
    assert torch.cosine_similarity(one, two, dim=0) > 0.99
