"""Drafters on disk: the EAGLE-3 form, in the dialects of those who write it.

Paceline's own dialect is a flat config.json and tensors without a prefix, as vLLM and SGLang read it. Others nest the
layer's sizes (speculators), call the layer `layers.0`, put `model.` before names, or count feature layers from one less
(SGLang). All of them are read into one `Eagle3`; what a drafter here cannot be is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from paceline.errors import UserError
from paceline.files.reading import check, inside, read_object, shorten
from paceline.model.config import DecoderConfig, refuse_quantized
from paceline.model.rope import MAX_POSITIONS, Rope
from paceline.model.weights import Stored, check_dtype, inventory, read_weights, refuse_packed

ARCHITECTURE = "LlamaForCausalLMEagle3"
WINDOW = 512  # entries that a draft token looks back on, where a drafter from elsewhere does not say
ARCHITECTURES = {ARCHITECTURE, "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator"}
RETRAIN = "train one for this policy with `paceline draft train`"
OTHERS = ("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "attention_bias")
"""Variants of the shape that drafters here do not have: each changes what the same tensors compute."""
IGNORED = ("embed_tokens.weight", "rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight", "t2d")
"""The policy's own, or known from elsewhere."""
MAP = "d2t"
HEAD = "lm_head.weight"
MASK = "mask_hidden"  # features of draft tokens that are not known yet, of drafters that make a block in a pass
MIX_IN = "mix.up_proj.weight"
MIX_OUT = "mix.down_proj.weight"
INTEGERS = ("I64", "I32", "I16")

Layers = Annotated[list[int], Field(max_length=64)]
Window = Annotated[int, Field(ge=0, le=MAX_POSITIONS)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class TrainedOn(_Section):
    """What a drafter learned from, as its card tells it."""

    policy: str
    task: str
    answers: int
    tokens: int | None = None
    steps: int | None = None


class BlockSection(_Section):
    """Of a drafter that makes several draft tokens in a pass."""

    tokens: Annotated[int, Field(ge=1, le=64)]
    sequential: bool = False


class DrafterSection(_Section):
    """What only Paceline writes."""

    window: Window | None = None
    feature_layers: Layers | None = None
    layers: int | None = None
    head: str | None = None
    trained: TrainedOn | None = None
    block: BlockSection | None = None


class EagleSection(_Section):
    eagle_aux_hidden_state_layer_ids: Layers | None = None


class DrafterConfig(_Section):
    """What is read of a drafter's config.json besides its sizes, which are compared with the policy's."""

    intermediate_size: Annotated[int, Field(ge=1, le=2**24)] | None = None
    sliding_window: Window | None = None
    eagle_aux_hidden_state_layer_ids: Layers | None = None
    eagle_config: EagleSection | None = None
    ptd_token_id: Annotated[int, Field(ge=0)] | None = None
    paceline: DrafterSection | None = None


@dataclass
class Eagle3:
    """A drafter as it lies in a folder."""

    folder: Path
    hf: dict[str, Any]
    """Its config, flat."""
    tensors: dict[str, Tensor]
    """What it has learned, by the names that Paceline writes."""
    vocab: Tensor | None
    """The tokens that it can propose; None for all."""
    head: Tensor | None
    """[draft vocabulary, hidden], where there is one on disk."""

    @property
    def own(self) -> dict[str, Any]:
        """What only Paceline writes; empty for a drafter from elsewhere."""
        return self.hf.get("paceline") or {}

    @property
    def block(self) -> BlockSection | None:
        found = self.own.get("block")
        return BlockSection(**found) if found else None

    @property
    def mask_token(self) -> int:
        return int(self.hf.get("ptd_token_id") or 0)

    @property
    def window(self) -> int:
        return self.own.get("window") or self.hf.get("sliding_window") or WINDOW

    @property
    def follows_policy(self) -> bool:
        """Whether its head is the policy's, whatever rows are on disk."""
        return self.head is None or (bool(self.own) and self.own.get("head") != "own")

    def own_head(self, policy_rows: Tensor) -> Tensor | None:
        """Its head, if it is not the policy's. One from elsewhere that is the same today counts as the policy's."""
        if self.head is None or self.follows_policy or torch.equal(self.head, policy_rows.to("cpu", self.head.dtype)):
            return None
        return self.head

    def check_tensors(self, c: DecoderConfig, own_head: bool) -> None:
        """Refuse tensors that drafters for such a policy do not have, and shapes that are not theirs."""
        draft_vocab = c.vocab_size if self.vocab is None else len(self.vocab)
        wanted = _shapes(c, self.hf["intermediate_size"], draft_vocab if own_head else 0, self.block)
        for name in self.tensors.keys() - wanted.keys():
            raise UserError(
                f"the drafter at {self.folder} has the tensor {shorten(name)}, which drafters here do not have"
            )
        tensors = self.tensors | ({HEAD: self.head} if own_head and self.head is not None else {})
        for name, shape in wanted.items():
            if name not in tensors:
                raise UserError(f"the drafter at {self.folder} lacks the tensor {name}")
            if tuple(tensors[name].shape) != shape:
                raise UserError(
                    f"tensor {name} of the drafter at {self.folder} has shape {list(tensors[name].shape)}, but the "
                    f"policy needs {list(shape)}"
                )

    def check(self, c: DecoderConfig) -> None:
        """Refuse one that was made for another policy, or that is of another kind."""
        if self.hf.get("intermediate_size") is None:
            raise UserError(f"the config.json of the drafter at {self.folder} has no intermediate_size")
        for name, mine in (
            ("hidden_size", c.hidden_size),
            ("vocab_size", c.vocab_size),
            ("num_attention_heads", c.heads),
            ("num_key_value_heads", c.kv_heads),
        ):
            if self.hf.get(name) != mine:
                raise UserError(self._has(f"{name} {shorten(str(self.hf.get(name)))}", f"{mine}; {RETRAIN}"))
        if self.hf.get("head_dim") not in (None, c.head_dim):
            raise UserError(self._has(f"head_dim {shorten(str(self.hf['head_dim']))}", f"{c.head_dim}; {RETRAIN}"))
        self._check_kind(c)
        if self.block and self.mask_token >= c.vocab_size:
            raise UserError(self._has(f"ptd_token_id {self.mask_token}", f"tokens below {c.vocab_size}"))
        self._check_taps(c)
        rope = Rope.from_hf(self.hf, f"the drafter at {self.folder}")
        layers = self.own.get("layers", c.layers)
        if layers != c.layers:
            raise UserError(self._has(f"a policy of {layers} layers behind it", f"{c.layers}; {RETRAIN}"))
        if (rope.theta, rope.kind) != (c.rope.theta, c.rope.kind):
            theirs, ours = (f"rope_theta {r.theta:g} ({r.kind})" for r in (rope, c.rope))
            raise UserError(self._has(theirs, f"{ours}, and a drafter here turns positions as its policy does"))
        if self.vocab is not None and (
            int(self.vocab.min()) < 0
            or int(self.vocab.max()) >= c.vocab_size
            or len(self.vocab.unique()) < len(self.vocab)
        ):
            raise UserError(
                f"d2t of the drafter at {self.folder} does not name different tokens of the policy's {c.vocab_size}"
            )

    def _has(self, theirs: str, ours: str) -> str:
        return f"the drafter at {self.folder} has {theirs}, but the policy has {ours}"

    def _check_kind(self, c: DecoderConfig) -> None:
        kind = self.hf.get("eagle_config") or {}
        for name in OTHERS:
            if self.hf.get(name) or kind.get(name):
                raise UserError(f"the drafter at {self.folder} has {name}, which drafters here do not have; {RETRAIN}")
        if self.hf.get("num_hidden_layers", 1) != 1:
            depth = shorten(str(self.hf["num_hidden_layers"]))
            raise UserError(f"the drafter at {self.folder} has {depth} layers, but drafters have one")
        if self.hf.get("target_hidden_size") not in (None, c.hidden_size):
            raise UserError(
                self._has(f"target_hidden_size {shorten(str(self.hf['target_hidden_size']))}", str(c.hidden_size))
            )

    def _check_taps(self, c: DecoderConfig) -> None:
        """Layers are counted by the hidden state that enters them; in `eagle_config`, as SGLang reads it, by the one
        that leaves. Some write the first kind there too: where that fits the policy, it is what was meant."""
        nested = (self.hf.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        known = self.own.get("feature_layers") or self.hf.get("eagle_aux_hidden_state_layer_ids")
        readings = [known] if known else [[i + 1 for i in nested], nested] if nested else []
        taps = list(c.tap_layers)
        if readings and taps not in readings:
            raise UserError(
                f"the drafter at {self.folder} was trained on features from layers {readings[0]} of "
                f"{self.own.get('layers', '?')}, but the policy gives {taps} of {c.layers}; {RETRAIN}"
            )
        if not readings and taps != [2, c.layers // 2, c.layers - 3]:
            raise UserError(
                f"the drafter at {self.folder} does not say which layers its features come from, and what others "
                f"take for granted does not fit a policy of {c.layers} layers, which gives {taps}; {RETRAIN}"
            )


def read_eagle3(folder: Path) -> Eagle3:
    hf = _flat(_read_config(folder), folder)
    where = f"the config.json of the drafter at {folder}"
    refuse_quantized(hf, f"the drafter at {folder}")
    check(DrafterConfig, hf, where)
    tensors = _read_tensors(folder)
    offsets, head = tensors.pop(MAP, None), tensors.pop(HEAD, None)
    vocab = None
    if offsets is not None:
        if offsets.dim() != 1 or not len(offsets):
            raise UserError(f"d2t of the drafter at {folder} has shape {list(offsets.shape)}, but is a list of tokens")
        if len(offsets) != hf.get("vocab_size") or bool(offsets.any()):
            vocab = offsets.to(torch.int64) + torch.arange(len(offsets))
    return Eagle3(folder, hf, tensors, vocab, head)


def make_config(
    c: DecoderConfig, intermediate_size: int, window: int, draft_vocab: int, dtype: torch.dtype, own_head: bool = False
) -> dict[str, Any]:
    """Paceline's config.json of a drafter for a policy of this shape."""
    rope = {key: c.hf[key] for key in ("rope_theta", "rope_parameters", "rope_scaling") if c.hf.get(key) is not None}
    rope.setdefault("rope_theta", c.rope.theta)  # readers know either spelling
    rope.setdefault("rope_parameters", c.rope.scaling | {"rope_theta": c.rope.theta, "rope_type": c.rope.kind})
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": c.hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": draft_vocab,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "paceline": {
            "window": window,
            "feature_layers": list(c.tap_layers),
            "layers": c.layers,
            "head": "own" if own_head else "policy",
        },
    } | rope


def vocabulary_maps(ids: Tensor, size: int) -> dict[str, Tensor]:
    """d2t, to be added to a draft token's number, and t2d, whether a token can be proposed."""
    ids = ids.cpu()
    return {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True),
    }


def _shapes(
    c: DecoderConfig, intermediate: int, head: int, block: BlockSection | None = None
) -> dict[str, tuple[int, ...]]:
    """Of all tensors of a drafter, by their names in checkpoints; `head` is how many tokens one of its own scores."""
    h, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, 3 * h),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (intermediate, h),
        "midlayer.mlp.up_proj.weight": (intermediate, h),
        "midlayer.mlp.down_proj.weight": (h, intermediate),
        "norm.weight": (h,),
    }
    if block:
        shapes[MASK] = (1, 3 * h)
    if block and block.sequential:
        shapes |= {MIX_IN: (h, 2 * h), MIX_OUT: (h, h)}
    return shapes | ({HEAD: (head, h)} if head else {})


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").exists():
        raise UserError(f"no drafter at {folder}: there is no config.json; {RETRAIN}")
    hf = read_object(inside(folder, "config.json"))
    if not is_drafter(hf) or hf.get("speculators_model_type", "eagle3") is None:
        kind = shorten(str(hf.get("architectures")))
        raise UserError(f"{folder} holds {kind}, not a drafter ({ARCHITECTURE}); {RETRAIN}")
    return hf


def is_drafter(hf: dict[str, Any]) -> bool:
    """Whether a config.json is that of a drafter."""
    names = hf.get("architectures")
    known = isinstance(names, list) and any(isinstance(name, str) and name in ARCHITECTURES for name in names)
    return known or "speculators_model_type" in hf


def _flat(hf: dict[str, Any], folder: Path) -> dict[str, Any]:
    if "speculators_model_type" not in hf:
        return hf
    if hf["speculators_model_type"] != "eagle3":
        kind = shorten(str(hf["speculators_model_type"]))
        raise UserError(f"{folder} holds a speculator of type {kind}, not eagle3; {RETRAIN}")
    layer = hf.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError(f"the config.json of {folder} has no transformer_layer_config")
    mine = {name: value for name, value in hf.items() if name not in ("transformer_layer_config", "speculators_config")}
    return layer | mine


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """By the names that Paceline writes, without those that it does not need."""
    found = inventory(folder)
    refuse_packed(found)
    names: dict[str, str] = {}
    for theirs, stored in found.items():
        name = theirs.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
        if name in IGNORED:
            continue
        if name in names.values():
            raise UserError(f"the drafter at {folder} has the tensor {shorten(name)} twice, as {shorten(theirs)} too")
        _check_type(name, stored)
        names[theirs] = name
    return {names[theirs]: tensor for theirs, tensor in read_weights(found, names)}


def _check_type(name: str, stored: Stored) -> None:
    if name != MAP:
        check_dtype(name, stored)
    elif stored.dtype not in INTEGERS:
        raise UserError(f"d2t in {stored.file} is of type {shorten(stored.dtype)}, but holds whole numbers")
