"""The neural drafter, in EAGLE-3's shape: one decoder layer over the policy's features, with the policy's own
embeddings and head, so that it follows the policy for free.

Its entry for place p of a text is made of token p and of what the policy thought of token p-1: the three tapped hidden
states, fused to one. From there the layer's output takes the place of the features, guess after guess. Its cache is a
window of its latest entries (`draft.window`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.kernels.epilogue import norm_beside
from paceline.model import fast
from paceline.model.decoder import Attention, Decoder, Layer, rms_norm
from paceline.model.rope import rotations

ARCHITECTURE = "LlamaForCausalLMEagle3"
WINDOW = 512
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class DrafterShape:
    intermediate_size: int
    window: int = WINDOW
    """Entries that a guess looks back on."""


class NeuralDrafter(nn.Module):
    vocab: Tensor | None

    def __init__(self, policy: Decoder, shape: DrafterShape | None = None, vocab: Tensor | None = None):
        """`vocab` lists the tokens that it can guess; by default all."""
        super().__init__()
        c = policy.config
        self.shape = shape or DrafterShape(c.intermediate_size, min(WINDOW, c.max_positions))
        self.tap_layers = c.tap_layers
        own = replace(
            c,
            intermediate_size=self.shape.intermediate_size,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
        )
        self._policy = (policy,)  # in a tuple, so that its parameters are not this module's
        h = c.hidden_size
        self.fc = nn.Parameter(torch.empty(h, 3 * h))
        self.embed_norm = nn.Parameter(torch.empty(h))
        self.layer = Layer(own, c.layers, beside=h)
        self.norm = nn.Parameter(torch.empty(h))
        self.register_buffer("vocab", vocab, persistent=False)
        self.to(device=policy.device, dtype=policy.dtype)
        self._head: Tensor | None = None
        self.requires_grad_(False)

    @property
    def policy(self) -> Decoder:
        return self._policy[0]

    @torch.no_grad()
    def init_weights(self, seed: int = 0, std: float = 0.02) -> NeuralDrafter:
        generator = torch.Generator("cpu").manual_seed(seed)
        for param in self.parameters():
            if param.dim() < 2:
                param.fill_(1.0)
            else:
                param.copy_(torch.empty(param.shape).normal_(0, std, generator=generator))
        return self

    def fuse(self, features: Tensor) -> Tensor:
        """The policy's tapped states [N, 3 * hidden] -> [N, hidden]"""
        return torch.mm(features, self.fc.t())

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Entries of tokens [N] with what is known of the token before each, [N, hidden] -> [N, hidden]."""
        return self.run(tokens, hidden, self.rotations(positions, hidden.dtype), attention)

    def rotations(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotations(positions, self.policy.inv_freq, self.policy.rope_signs, dtype)

    def run(self, tokens: Tensor, hidden: Tensor, turned: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """`forward` where the rotations are known."""
        return self.step(tokens, hidden, turned, attention)[0]

    def step(
        self, tokens: Tensor, hidden: Tensor, turned: tuple[Tensor, Tensor], attention: Attention
    ) -> tuple[Tensor, Tensor | None]:
        """`run`, and where it comes with that, what the head reads: its output normed."""
        table, layer = self.policy.embed.weight, self.layer
        if fast.applies(hidden, attention):
            normed = norm_beside(tokens, table, self.embed_norm, hidden, layer.input_norm, layer.eps)
            return fast.run_layer(layer, hidden, normed, *turned, attention, self.norm)
        embedded = F.embedding(tokens, table).to(hidden.dtype)
        return layer.forward(hidden, *turned, attention, rms_norm(embedded, self.embed_norm, layer.eps)), None

    def logits(self, hidden: Tensor, normed: Tensor | None = None) -> Tensor:
        """[N, hidden] -> scores of the next token [N, guessable tokens]; quicker where it is known normed."""
        if normed is None:
            normed = rms_norm(hidden, self.norm, self.layer.eps)
        normed = normed.to(self.policy.dtype)
        return self.policy.logits(normed) if self.vocab is None else torch.mm(normed, self.head().t())

    def head(self) -> Tensor:
        """The rows of the policy's head that belong to the guessable tokens; a copy, so `refresh` it."""
        if self._head is None:
            assert self.vocab is not None
            self._head = self.policy.head.weight.detach()[self.vocab].clone()
        return self._head

    def refresh(self) -> None:
        """The policy has changed: bring the copied rows of its head up to date, in place."""
        if self._head is not None and self.vocab is not None:
            torch.index_select(self.policy.head.weight.detach(), 0, self.vocab, out=self._head)


def save_drafter(drafter: NeuralDrafter, folder: Path) -> None:
    """Write a checkpoint in the form that serving engines read."""
    folder.mkdir(parents=True, exist_ok=True)
    c = drafter.policy.config
    rope = {key: c.hf[key] for key in ("rope_theta", "rope_parameters", "rope_scaling") if c.hf.get(key) is not None}
    hf = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": c.hidden_size,
        "intermediate_size": drafter.shape.intermediate_size,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.vocab_size if drafter.vocab is None else len(drafter.vocab),
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": False,
        "dtype": str(drafter.fc.dtype).removeprefix("torch."),
        "paceline": {"window": drafter.shape.window, "feature_layers": list(drafter.tap_layers), "layers": c.layers},
    } | rope
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in _layout(drafter).items()}
    if drafter.vocab is not None:
        ids = drafter.vocab.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        tensors["lm_head.weight"] = drafter.head().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def new_drafter(policy: Decoder, window: int, seed: int, vocab: Tensor | None = None) -> NeuralDrafter:
    """An untrained one, as wide as a layer of its policy."""
    shape = DrafterShape(policy.config.intermediate_size, min(window, policy.config.max_positions))
    return NeuralDrafter(policy, shape, vocab).init_weights(seed)


def load_drafter(folder: Path, policy: Decoder) -> NeuralDrafter:
    """A drafter for `policy`; refuses one that was made for another."""
    hf = _read_config(folder)
    c, own = policy.config, hf.get("paceline", {})
    for name, mine in (
        ("hidden_size", c.hidden_size),
        ("vocab_size", c.vocab_size),
        ("num_attention_heads", c.heads),
        ("num_key_value_heads", c.kv_heads),
    ):
        if hf.get(name) != mine:
            raise UserError(f"the drafter at {folder} has {name} {hf.get(name)}, but the policy has {mine}; {_RETRAIN}")
    taps = own.get("feature_layers", list(c.tap_layers))
    if tuple(taps) != c.tap_layers or own.get("layers", c.layers) != c.layers:
        raise UserError(
            f"the drafter at {folder} was trained on features from layers {taps} of {own.get('layers', '?')}, "
            f"but the policy gives {list(c.tap_layers)} of {c.layers}; {_RETRAIN}"
        )
    shape = DrafterShape(hf["intermediate_size"], min(own.get("window", WINDOW), c.max_positions))
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, FileNotFoundError) as err:
        raise UserError(f"{folder / WEIGHTS} cannot be read as safetensors ({err}); is the copy complete?") from err
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else None
    drafter = NeuralDrafter(policy, shape, ids)
    for name, target in _layout(drafter).items():
        if name not in tensors:
            raise UserError(f"the drafter at {folder} lacks the tensor {name}")
        if tensors[name].shape != target.shape:
            have, want = list(tensors[name].shape), list(target.shape)
            raise UserError(f"tensor {name} of the drafter at {folder} has shape {have}, but the policy needs {want}")
        with torch.no_grad():
            target.copy_(tensors[name])
    return drafter


_RETRAIN = "train one for this policy with `paceline draft train`"


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        hf: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError as err:
        raise UserError(f"no drafter at {folder}: there is no config.json; {_RETRAIN}") from err
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise UserError(f"{file} is not valid JSON: {err}") from err
    if ARCHITECTURE not in hf.get("architectures", []):
        raise UserError(f"{folder} holds {hf.get('architectures')}, not a drafter ({ARCHITECTURE}); {_RETRAIN}")
    return hf


def _layout(drafter: NeuralDrafter) -> dict[str, Tensor]:
    """Names in checkpoints, and the tensors, or parts of fused tensors, that hold them here."""
    layer: Any = drafter.layer
    c = drafter.policy.config
    q, k, v = layer.qkv.split((c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim))
    gate, up = layer.gate_up.chunk(2)
    return {
        "fc.weight": drafter.fc,
        "midlayer.input_layernorm.weight": drafter.embed_norm,
        "midlayer.hidden_norm.weight": layer.input_norm,
        "midlayer.post_attention_layernorm.weight": layer.post_norm,
        "midlayer.self_attn.q_proj.weight": q,
        "midlayer.self_attn.k_proj.weight": k,
        "midlayer.self_attn.v_proj.weight": v,
        "midlayer.self_attn.o_proj.weight": layer.o,
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": up,
        "midlayer.mlp.down_proj.weight": layer.down,
        "norm.weight": drafter.norm,
    }
