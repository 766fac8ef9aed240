"""The shape of a decoder, read from a Hugging Face config.

Model families that share the dense Llama shape differ by flags; another one is one more entry in `FAMILIES`. Anything
else is refused by name rather than run wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.errors import UserError
from paceline.files.reading import check, shorten
from paceline.model.rope import MAX_POSITIONS, Rope


@dataclass(frozen=True)
class Family:
    """How a model family differs from plain Llama. What single models of a family choose is read from their config:
    tied embeddings, `attention_bias`, `mlp_bias`, head_dim, rope scaling."""

    architecture: str
    """Its class in transformers, written into checkpoints."""
    qkv_bias: bool = False
    """q, k and v always have a bias, whatever `attention_bias` says."""
    o_bias: bool = False
    """`attention_bias` also gives the attention's output projection a bias."""
    qk_norm: bool = False
    """Queries and keys have an RMSNorm per head."""
    optional_window: bool = False
    """`sliding_window` counts only where `use_sliding_window` is set."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", o_bias=True),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, optional_window=True),
    "qwen3": Family("Qwen3ForCausalLM", o_bias=True, qk_norm=True, optional_window=True),
    "mistral": Family("MistralForCausalLM"),
}
"""By `model_type` in config.json."""
MAX_HEAD_DIM = 4096

# Bounds far beyond any model of these families: a damaged number is refused before anything is made of it.
Size = Annotated[int, Field(ge=1, le=2**20)]
Vocabulary = Annotated[int, Field(ge=1, le=2**24)]
Positions = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
Tokens = int | Annotated[list[int], Field(max_length=1000)]


class OwnSection(BaseModel):
    """What Paceline adds to the config.json of a model."""

    model_config = ConfigDict(extra="ignore", strict=True)

    style: Literal["search", "chat", "text"] | None = None


class HfConfig(BaseModel):
    """What is read of a model's config.json."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model_type: str
    vocab_size: Vocabulary
    hidden_size: Size
    intermediate_size: Annotated[int, Field(ge=1, le=2**24)]
    num_hidden_layers: Annotated[int, Field(ge=1, le=4096)]
    num_attention_heads: Annotated[int, Field(ge=1, le=2**14)]
    num_key_value_heads: Annotated[int, Field(ge=1, le=2**14)] | None = None
    head_dim: Annotated[int, Field(ge=1, le=MAX_HEAD_DIM)] | None = None
    max_position_embeddings: Positions = 2048
    sliding_window: Annotated[int, Field(ge=0, le=MAX_POSITIONS)] | None = None
    use_sliding_window: bool | None = None
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=1, allow_inf_nan=False)] = 1e-6
    hidden_act: str | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: Tokens | None = None
    paceline: OwnSection | None = None


@dataclass(frozen=True)
class DecoderConfig:
    family: str
    """Key of `FAMILIES`: the `model_type` in config.json."""
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

    @property
    def parameters(self) -> int:
        """Number of parameters of a model of this shape, counted without making one."""
        h, d, i = self.hidden_size, self.head_dim, self.intermediate_size
        layer = 2 * h + self.qkv_size * h + self.heads * d * h + 3 * i * h
        layer += self.qkv_bias * self.qkv_size + self.o_bias * h + self.mlp_bias * (2 * i + h) + self.qk_norm * 2 * d
        return self.layers * layer + h + (1 if self.tied else 2) * self.vocab_size * h

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str = "the model") -> DecoderConfig:
        source = f"the config.json of {where}"
        model_type = hf.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise UserError(
                f"{where} is of family '{shorten(str(model_type))}', which Paceline does not run; "
                f"it runs {', '.join(FAMILIES)}; with rollout.engine=vllm others can be trained too"
            )
        family = FAMILIES[model_type]
        refuse_quantized(hf, where)
        c = check(HfConfig, hf, source)
        if c.hidden_act not in (None, "silu"):
            raise UserError(f"{where} uses the activation '{shorten(c.hidden_act)}'; Paceline runs silu only")
        heads = c.num_attention_heads
        kv_heads = c.num_key_value_heads or heads
        head_dim = c.head_dim or c.hidden_size // heads
        if heads % kv_heads:
            raise UserError(f"{source} has {heads} attention heads, which {kv_heads} key/value heads do not divide")
        if head_dim < 2 or head_dim % 2 or head_dim > MAX_HEAD_DIM:
            raise UserError(
                f"{source} gives heads {head_dim} dimensions; they need an even number from 2 to {MAX_HEAD_DIM}"
            )
        bias = bool(c.attention_bias)
        return cls(
            family=model_type,
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            layers=c.num_hidden_layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_positions=_max_positions(c, family),
            rope=Rope.from_hf(hf, where),
            norm_eps=c.rms_norm_eps,
            tied=bool(c.tie_word_embeddings),
            qkv_bias=family.qkv_bias or bias,
            o_bias=family.o_bias and bias,
            mlp_bias=bool(c.mlp_bias),
            qk_norm=family.qk_norm,
            eos_ids=eos_ids(c.eos_token_id, c.vocab_size, source),
            hf=dict(hf),
        )


def eos_ids(value: int | list[int] | None, vocab_size: int, source: str) -> tuple[int, ...]:
    """The tokens that end a completion, which must be in the model's vocabulary."""
    ids = tuple(value) if isinstance(value, list) else () if value is None else (value,)
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UserError(f"'eos_token_id' in {source} names token {token}, but the model has {vocab_size} tokens")
    return ids


def refuse_quantized(hf: dict[str, Any], where: str) -> None:
    """Quantized weights would be read as if they were the values that they encode."""
    for key in ("quantization_config", "compression_config"):
        settings = hf.get(key)
        if settings:
            method = settings.get("quant_method", key) if isinstance(settings, dict) else key
            raise UserError(
                f"{where} is quantized ({shorten(str(method), 40)}); Paceline trains full-precision weights: "
                "dequantize it first"
            )


def _max_positions(c: HfConfig, family: Family) -> int:
    """Context length in tokens. Within a sliding window attention is ordinary causal attention, so a model with one is
    run up to the window, which is then its context length."""
    window = c.sliding_window
    if family.optional_window and not c.use_sliding_window:
        window = None
    return min(c.max_position_embeddings, window) if window else c.max_position_embeddings
