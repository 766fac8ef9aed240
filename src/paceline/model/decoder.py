"""The decoder. The same module is used for rollout and for learning, so there is one set of weights, and no transfer.

It takes a flat row of N tokens, whatever they belong to: packed training sequences, prompts, one token of each running
request, or draft trees. Which token sees which is up to the `attention` that it is called with, which also owns any
cache; the model knows neither pages nor graphs nor padding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels.fused import fuses
from paceline.kernels.positions import rotations
from paceline.model.config import DecoderConfig
from paceline.model.rope import rotate, rotation_constants


class Attention(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, heads, d], k and v [N, kv_heads, d] of this layer -> [N, heads * d]."""
        ...


Matmul = Callable[[Tensor, Tensor], Tensor]
"""Called with x [N, inputs] and a weight [inputs, outputs] -> [N, outputs]."""
LayerRunner = Callable[..., Tensor]
"""Called with (layer, *inputs); lets a learner wrap each layer, for example to recompute it in the backward pass."""


class Layer(nn.Module):
    """One decoder layer: a dozen tensors and a formula.

    Small models spend their time in launching operations, so the tensors are this module's own (reached through one
    dictionary, not through submodules), transposed views are kept, and residuals are added within matmuls (addmm).
    """

    qkv: Tensor
    input_norm: Tensor

    def __init__(self, config: DecoderConfig, index: int, concat_size: int = 0):
        """`concat_size`: width of an input that is concatenated with the normed residual stream before the qkv matmul;
        a drafter's embeddings."""
        super().__init__()
        c = config
        self.index = index
        self.qk_heads = (c.heads, c.kv_heads)
        self.head_dim = c.head_dim
        self.eps = c.norm_eps
        mixed = c.heads * c.head_dim
        shapes = {
            "input_norm": (c.hidden_size,),
            "qkv": (c.qkv_size, concat_size + c.hidden_size),
            "qkv_bias": (c.qkv_size,) if c.qkv_bias else None,
            "q_norm": (c.head_dim,) if c.qk_norm else None,
            "k_norm": (c.head_dim,) if c.qk_norm else None,
            "o": (c.hidden_size, mixed),
            "o_bias": (c.hidden_size,) if c.o_bias else None,
            "post_norm": (c.hidden_size,),
            "gate_up": (2 * c.intermediate_size, c.hidden_size),
            "gate_up_bias": (2 * c.intermediate_size,) if c.mlp_bias else None,
            "down": (c.hidden_size, c.intermediate_size),
            "down_bias": (c.hidden_size,) if c.mlp_bias else None,
        }
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape)))
        self._views: tuple[int, dict[str, Tensor | None]] = (0, {})
        self.adapted: dict[str, Matmul] = {}
        """By the name of a matrix, what makes its products where gradients are asked for; adapters set it."""

    def _weights(self) -> dict[str, Any]:
        """The parameters by name, matrices transposed to [in, out] for torch.mm. Without gradients the views are cached
        until the weights are moved; an optimizer that works in place changes what they show."""
        if torch.is_grad_enabled():
            return {name: p.t() if p is not None and p.dim() == 2 else p for name, p in self._parameters.items()}
        where = self.qkv.data_ptr()
        if self._views[0] != where:
            kept = {name: None if p is None else p.detach() for name, p in self._parameters.items()}
            self._views = where, {k: v.t() if v is not None and v.dim() == 2 else v for k, v in kept.items()}
        return self._views[1]

    def is_idle(self) -> bool:
        """Whether all output projections are zero, so that the layer adds nothing to the residual stream."""
        own = dict(self.named_parameters())
        return not any(bool(own[name].any()) for name in ("o", "down", "o_bias", "down_bias") if name in own)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, concat: Tensor | None = None
    ) -> Tensor:
        """x [N, hidden], cos and sin [N, 1, head_dim], concat [N, concat_size] -> [N, hidden]"""
        w = self._weights()
        n = x.shape[0]
        rotated = sum(self.qk_heads)
        normed = rms_norm(x, w["input_norm"], self.eps)
        if concat is not None:
            normed = torch.cat((concat, normed), -1)
        qkv = self._matmul(normed, w, "qkv").view(n, -1, self.head_dim)
        qk, v = qkv.split((rotated, qkv.shape[1] - rotated), 1)
        if w["q_norm"] is not None:
            q, k = qk.split(self.qk_heads, 1)
            qk = torch.cat((rms_norm(q, w["q_norm"], self.eps), rms_norm(k, w["k_norm"], self.eps)), 1)
        q, k = rotate(qk, cos, sin).split(self.qk_heads, 1)
        x = self._residual_matmul(x, attention(self.index, q, k, v), w, "o")
        gate_up = self._matmul(rms_norm(x, w["post_norm"], self.eps), w, "gate_up")
        if w["down_bias"] is None and fuses(x):
            return x.addmm_(gated(gate_up), w["down"])  # in place: x was made in this layer, and a copy is a kernel
        return self._residual_matmul(x, gated(gate_up), w, "down")

    def _matmul(self, x: Tensor, w: dict[str, Any], name: str) -> Tensor:
        """x times the weight called `name` (+ its bias)"""
        weight, bias = w[name], w[name + "_bias"]
        if name in self.adapted and torch.is_grad_enabled():
            out = self.adapted[name](x, weight)
            return out if bias is None else out + bias
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def _residual_matmul(self, residual: Tensor, x: Tensor, w: dict[str, Any], name: str) -> Tensor:
        """residual + x times the weight called `name` (+ its bias)"""
        weight, bias = w[name], w[name + "_bias"]
        residual = residual if bias is None else residual + bias
        if name in self.adapted and torch.is_grad_enabled():
            return residual + self.adapted[name](x, weight)
        return torch.addmm(residual, x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight"""
    if x.is_cuda or torch.is_grad_enabled():
        return torch.rms_norm(x, (x.shape[-1],), weight, eps)
    # On a CPU torch uses eight small operations for that; four do the same, at half the cost for small models:
    # sqrt(mean(x^2) + eps) is the hypotenuse of |x| and sqrt(d * eps), over sqrt(d).
    d = x.shape[-1]
    size = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _scalar(math.sqrt(d * eps), x.dtype))
    return torch.addcmul(_scalar(0.0, x.dtype), x / size, weight, value=math.sqrt(d))


@functools.cache
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def gated(gate_up: Tensor) -> Tensor:
    """[N, 2 * size], gate and up concatenated -> silu(gate) * up, [N, size]"""
    if fuses(gate_up):
        from paceline.kernels.fused_triton import gated as fused

        return fused(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class Decoder(nn.Module):
    inv_freq: Tensor
    rope_signs: Tensor

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        inv_freq, rope_signs = rotation_constants(config.rope, config.head_dim, torch.device("cpu"), torch.float32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("rope_signs", rope_signs, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        """Moves and casts like any module, but the rotary frequencies stay float32 or wider: thousands times a bfloat16
        frequency would be noise."""
        super()._apply(fn, recurse)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        if self.device.type != "meta":
            c = self.config
            self.inv_freq, self.rope_signs = rotation_constants(c.rope, c.head_dim, self.device, wide)
        return self

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        *,
        taps: bool = False,
        run: LayerRunner | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """tokens and positions [N] -> final hidden states [N, hidden], ready for `logits`, and, if asked for, the
        features [N, 3 * hidden] that a drafter reads: the hidden states entering `config.tap_layers`."""
        x = self.embed(tokens)
        cos, sin = rotations(positions, self.inv_freq, self.rope_signs, x.dtype)
        features = []
        tap_layers = self.config.tap_layers if taps else ()
        if run is None and fuses(x):
            from paceline.model import fast  # a GPU's kernels, which nobody else loads

            if fast.applies(x, attention):
                return fast.run_layers(cast(list[Layer], self.layers), x, cos, sin, attention, self.norm, tap_layers)
        for layer in self.layers:
            if layer.index in tap_layers:
                features.append(x)
            x = run(layer, x, cos, sin, attention) if run else layer.forward(x, cos, sin, attention)
        return rms_norm(x, self.norm, self.config.norm_eps), torch.cat(features, -1) if taps else None

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    @torch.no_grad()
    def init_weights(self, seed: int = 0, std: float = 0.02) -> Decoder:
        """Fresh weights from N(0, std^2), with std / sqrt(2 * layers) for the projections that write into the residual
        stream, so that its norm does not grow with the number of layers."""
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, param in self.named_parameters():
            if param.dim() < 2:
                param.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            scale = std / (2 * self.config.layers) ** 0.5 if name.endswith((".o", ".down")) else std
            param.copy_(torch.empty(param.shape).normal_(0, scale, generator=generator))
        return self


def last_active_layer(model: Decoder) -> Layer:
    """The last layer that adds something to the residual stream; the last one if all are idle."""
    layers = cast(list[Layer], model.layers)
    return next((layer for layer in reversed(layers) if not layer.is_idle()), layers[-1])


def as_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtypes: dict[str, Any] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    return dtypes[name]
