"""A decoder that follows a Hugging Face model: the same outputs, shared memory where that can be, adapters merged."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.models.auto.configuration_auto import AutoConfig

from paceline.errors import UserError
from paceline.integrations.mirror import Mirror
from paceline.model.attention import PackedAttention
from tests.conftest import tiny_config

CLOSE = 1e-5  # transformers turns and norms in float32, whatever the model computes in
CLASSES = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}


def tiny(family: str = "llama", **changes: object):
    torch.manual_seed(0)
    values = tiny_config(family, **changes)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return CLASSES[family](config).double()


@torch.no_grad()
def difference(mirror: Mirror, model) -> float:
    tokens = torch.arange(2, 34)
    attention = PackedAttention([len(tokens)], torch.device("cpu"))
    hidden, _ = mirror.decoder(tokens, attention.positions(), attention)
    return float((mirror.decoder.logits(hidden) - model(tokens[None]).logits[0]).abs().max())


@torch.no_grad()
def learn(model) -> None:
    """In place, as an optimizer does it."""
    for param in model.parameters():
        if param.requires_grad:
            param.add_(torch.randn_like(param), alpha=0.1)


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
def test_it_follows(family, tied):
    model = tiny(family, tie_word_embeddings=tied)
    mirror = Mirror(model)
    assert difference(mirror, model) < CLOSE
    learn(model)
    assert difference(mirror, model) > 1e-3  # what is fused here is a copy
    mirror.sync()
    assert difference(mirror, model) < CLOSE


def test_memory_is_shared_where_the_layout_allows():
    model = tiny()
    mirror = Mirror(model)
    layer = model.model.layers[1]
    assert mirror.decoder.layers[1].o.data_ptr() == layer.self_attn.o_proj.weight.data_ptr()
    assert mirror.decoder.embed.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    fused = sum(p.numel() for n, p in model.named_parameters() if n.split(".")[-2] in FUSED)
    assert mirror.shared_bytes == 8 * (sum(p.numel() for p in model.parameters()) - fused)


FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def test_another_precision_is_a_copy():
    mirror = Mirror(tiny(), torch.float32)
    assert mirror.shared_bytes == 0 and mirror.decoder.dtype == torch.float32


def test_a_model_that_moves_is_noticed():
    model = tiny()
    mirror = Mirror(model)
    assert not mirror.moved
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    assert mirror.moved


ADAPTERS = {
    "attention": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
    "all, scaled by rank": {"target_modules": "all-linear", "use_rslora": True},
    "with magnitudes": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "beside a trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_adapters_are_merged_into_the_copy_alone(adapter):
    torch.manual_seed(1)
    model = get_peft_model(tiny(), LoraConfig(r=4, init_lora_weights=False, **adapter)).double()
    mirror = Mirror(model)
    assert difference(mirror, model) < CLOSE
    learn(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    mirror.sync()
    assert difference(mirror, model) < CLOSE
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_what_cannot_be_followed_is_refused():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32))
    with pytest.raises(UserError, match="family 'gpt2', which Paceline does not run"):
        Mirror(gpt2)
    prompts = get_peft_model(tiny(), PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4))
    with pytest.raises(UserError, match="PROMPT_TUNING, which cannot be merged"):
        Mirror(prompts)
    packed = tiny()
    projection = packed.model.layers[0].self_attn.q_proj
    projection.weight = torch.nn.Parameter(torch.zeros(64, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(UserError, match=r"q_proj.weight .* quantized"):
        Mirror(packed)
