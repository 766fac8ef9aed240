"""The shape of a decoder, read from a Hugging Face config.

Four families share one dense shape and differ by flags: Llama, Qwen2 (bias on q, k, v), Qwen3 (norms on q and k) and
Mistral. Anything else is refused by name rather than run wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.errors import UserError
from paceline.model.rope import Rope

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


@dataclass(frozen=True)
class DecoderConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rope: Rope
    norm_eps: float = 1e-6
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    hf: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The config as it was read; written back when the model is saved."""

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, "query heads must be a multiple of key/value heads"
        assert self.head_dim % 2 == 0, "rotary embeddings pair up the head's dimensions"

    @property
    def qkv_size(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def tap_layers(self) -> tuple[int, int, int]:
        """Layers whose *input* a drafter sees. Serving engines default to 2, L//2 and L-3; below seven layers those
        collide, so shallow models spread three distinct taps evenly instead."""
        if self.layers >= 7:
            return 2, self.layers // 2, self.layers - 3
        if self.layers < 3:
            raise UserError(f"a drafter taps three depths, but this model has only {self.layers} layers")
        return 0, self.layers // 2, self.layers - 1

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str = "the model") -> DecoderConfig:
        family = hf.get("model_type")
        if family not in FAMILIES:
            raise UserError(
                f"{where} is of family '{family}', which Paceline does not run; it runs {', '.join(FAMILIES)}"
            )
        try:
            hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
            layers, intermediate, vocab = hf["num_hidden_layers"], hf["intermediate_size"], hf["vocab_size"]
        except KeyError as err:
            raise UserError(f"the config.json of {where} has no {err}") from err
        if hf.get("hidden_act", "silu") != "silu":
            raise UserError(f"{where} uses the activation '{hf['hidden_act']}'; Paceline runs silu only")
        bias = bool(hf.get("attention_bias", False))
        eos = hf.get("eos_token_id")
        return cls(
            family=family,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=intermediate,
            layers=layers,
            heads=heads,
            kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hidden // heads,
            max_positions=_max_positions(hf),
            rope=Rope.from_hf(hf, where),
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            tied=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bias,
            o_bias=bias and family in ("llama", "qwen3"),
            mlp_bias=bool(hf.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            hf=dict(hf),
        )


def _max_positions(hf: dict[str, Any]) -> int:
    """Context length. Within a sliding window attention is ordinary causal attention, so a model with one runs
    unchanged up to the window and is not offered further."""
    longest = hf.get("max_position_embeddings", 2048)
    window = hf.get("sliding_window")
    if hf.get("model_type") in ("qwen2", "qwen3") and not hf.get("use_sliding_window", False):
        window = None
    return min(longest, window) if window else longest
