"""The policy as the drafter's training has it: a copy of its weights, which reads finished answers once more.

Models of the families that Paceline's decoder runs are read by it. Others that transformers loads, mixtures of experts
for example, are read by transformers, whose hidden states are the same features: `hidden_states[k]` is what enters
layer k. What is refused there is a model that scales its embeddings or logits, because vLLM's drafter, which shares
them, does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.draft.eagle.loss import PackedSequences, before_completions, read_sequences
from paceline.draft.eagle.model import EagleModel
from paceline.errors import UserError
from paceline.files.reading import inside, read_object
from paceline.model.checkpoint import find_model, layout, load_model
from paceline.model.config import FAMILIES, DecoderConfig, refuse_quantized
from paceline.model.decoder import Decoder, as_dtype
from paceline.model.rope import rotation_constants
from paceline.model.weights import inventory, read_weights

SCALES = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "embedding_multiplier",
    "mup_width_multiplier",
    "scale_emb",
)
"""In the config of models that multiply or bend embeddings or logits."""
SCALED_FAMILIES = ("gemma", "granite", "cohere", "minicpm")


class FollowedPolicy(Protocol):
    decoder: Decoder
    """Embeddings, head and shape; the layers too where the decoder runs the model."""

    def read(self, drafter: EagleModel, answers: list[tuple[list[int], int]]) -> PackedSequences:
        """Tokens of prompts and answers, and how many of them are the prompt -> what a drafter learns from."""
        ...

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Weights of a newer policy by their Hugging Face names; those that are missing stay."""
        ...


class DecodedPolicy:
    def __init__(self, decoder: Decoder):
        self.decoder = decoder

    def read(self, drafter: EagleModel, answers: list[tuple[list[int], int]]) -> PackedSequences:
        return read_sequences(drafter, answers)

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> None:
        _copy_into(dict(layout(self.decoder)), weights)


class TransformersPolicy:
    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device):
        from transformers import AutoModelForCausalLM

        self.model: Any = (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval().requires_grad_(False)
        )
        self.decoder = _shell(self.model, path)

    @torch.no_grad()
    def read(self, drafter: EagleModel, answers: list[tuple[list[int], int]]) -> PackedSequences:
        taps = self.decoder.config.tap_layers
        features = []
        hidden = []
        for tokens, _ in answers:  # one by one: padding would be routed to experts too
            one = torch.tensor([tokens], device=self.decoder.device)
            found = self.model.base_model(one, output_hidden_states=True, use_cache=False)
            features.append(torch.cat([found.hidden_states[k][0] for k in taps], -1))
            hidden.append(found.last_hidden_state[0])
        lengths = [len(tokens) for tokens, _ in answers]
        return PackedSequences(
            tokens=torch.tensor([t for tokens, _ in answers for t in tokens], device=self.decoder.device),
            positions=torch.cat([torch.arange(n, device=self.decoder.device) for n in lengths]),
            features=torch.cat(features),
            hidden=torch.cat(hidden),
            learn=before_completions(lengths, [prompt for _, prompt in answers]).to(self.decoder.device),
        )

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> None:
        _copy_into(self.model.state_dict(), weights)


def load_policy(path: str, dtype: str, device: torch.device) -> FollowedPolicy:
    folder = find_model(path)
    hf = read_object(inside(folder, "config.json"))
    if hf.get("model_type") in FAMILIES:
        return DecodedPolicy(load_model(path, dtype, device))
    refuse_quantized(hf, path)
    return TransformersPolicy(folder, as_dtype(dtype, device), device)


def read_update(folder: Path) -> Mapping[str, Tensor]:
    """The weights of a checkpoint, on the host."""
    found = inventory(folder)
    return dict(read_weights(found, found))


def _copy_into(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """All of them fit, or none is copied."""
    known = {name.removeprefix("module."): weight for name, weight in weights.items()}
    matching = known.keys() & own.keys()
    if not matching:
        some = next(iter(known), "nothing")
        raise UserError(f"the policy's new weights have none of its tensors (the first is {some}): use its own names")
    for name in matching:
        if known[name].shape != own[name].shape:
            theirs, ours = list(known[name].shape), list(own[name].shape)
            raise UserError(f"the policy's new {name} has shape {theirs}, but the policy has {ours}")
    for name in matching:
        own[name].copy_(known[name])


def _shell(model: Any, path: Path) -> Decoder:
    """What a drafter needs of a policy, around a model of transformers: shape, embeddings and head, and no layers."""
    text = model.config.get_text_config()
    scaled = [name for name in SCALES if getattr(text, name, None) not in (None, 1, 1.0)]
    if scaled or str(text.model_type).startswith(SCALED_FAMILIES):
        reason = scaled[0] if scaled else f"the family {text.model_type}"
        raise UserError(
            f"{path} scales its embeddings or logits ({reason}), which vLLM's EAGLE-3 drafter does not: no drafter "
            "can be trained for it"
        )
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    rope = getattr(text, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0
    heads = text.num_attention_heads
    shape = {
        "model_type": "llama",
        "vocab_size": head.weight.shape[0],
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_hidden_layers": text.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "max_position_embeddings": text.max_position_embeddings,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "tie_word_embeddings": bool(text.tie_word_embeddings),
        "eos_token_id": text.eos_token_id,
    }
    config = DecoderConfig.from_hf(shape, str(path))
    with torch.device("meta"):
        shell = Decoder(config)
    shell.layers = nn.ModuleList()
    shell.embed.weight = embed.weight
    shell.head.weight = head.weight
    device = embed.weight.device
    shell.norm = nn.Parameter(torch.ones(text.hidden_size, dtype=embed.weight.dtype, device=device))
    shell.inv_freq, shell.rope_signs = rotation_constants(config.rope, config.head_dim, device, torch.float32)
    return shell.requires_grad_(False)
