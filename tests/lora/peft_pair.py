"""The same base and adapters in PEFT and in our decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.lora.adapters import Lora
from paceline.lora.files import read_adapter, read_lora_shape
from paceline.model import Decoder, load_model, save_model
from paceline.model.attention import PackedAttention

from ..conftest import tiny_model

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}


def peft_pair(
    folder: Path, variant: str = "llama", targets: Any = "all-linear", **lora: Any
) -> tuple[torch.nn.Module, Lora]:
    """A PEFT model in float32 with random adapters, and ours with the same ones, through saved folders: `folder/base`
    and `folder/adapter`."""
    family, changes = VARIANTS[variant]
    save_model(tiny_model(family, dtype=torch.float32, **changes), folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, attn_implementation="eager")
    theirs = get_peft_model(
        base, LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM"} | lora))
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            if "lora_" in name:
                param.copy_(torch.empty(param.shape).normal_(0, 0.1, generator=generator))
    theirs.save_pretrained(folder / "adapter")
    return theirs, ours_of(folder)


def ours_of(folder: Path, dtype: str = "float32") -> Lora:
    lora = Lora(load_model(str(folder / "base"), dtype), read_lora_shape(folder / "adapter"))
    lora.load(read_adapter(folder / "adapter", lora))
    return lora


def logits(model: Decoder, tokens: Tensor) -> Tensor:
    """tokens [N], one sequence -> [N, vocabulary]"""
    attention = PackedAttention([len(tokens)], tokens.device)
    return model.logits(model(tokens, attention.positions(), attention)[0])


def theirs_logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    out: Tensor = model(input_ids=tokens[None]).logits[0]
    return out
