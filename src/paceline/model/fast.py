"""The decoder's layers in few kernels, for passes with a KV cache: decode, verify, draft.

The same formula as `Layer.forward`, fused where a GPU would otherwise go back to memory between small operations: each
matmul leaves partial sums, and the next kernel adds them up and computes the norm that the next matmul reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.kernels.fused import fuses
from paceline.kernels.hopper.epilogue import HeadNorms, KVRows, rope_and_cache
from paceline.kernels.hopper.matmul import split_k_matmul
from paceline.kernels.hopper.normed_matmul import (
    ResidualStream,
    RopeArgs,
    norm_gated_matmul,
    norm_qkv_matmul,
    residual_matmul,
)

if TYPE_CHECKING:
    from paceline.model.decoder import Layer


@runtime_checkable
class CachedAttention(Protocol):
    def cache(self, layer: int) -> KVRows:
        """Where this layer's new keys and values are to be written before `attend`."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As calling it, but keys and values have been written to the cache already."""
        ...


def applies(x: Tensor, attention: object) -> bool:
    """Whether a pass over x [N, hidden] with this attention runs on these kernels."""
    return fuses(x) and isinstance(attention, CachedAttention)


def run_layers(
    layers: list[Layer], x: Tensor, cos: Tensor, sin: Tensor, attention: Any, norm: Tensor, taps: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """x [N, hidden] -> the last layer's output, normed with `norm`, and the features [N, len(taps) * hidden]: the
    inputs of the layers `taps`, if there are any."""
    stream = ResidualStream(x)
    features = []
    next_norms = [*(layer.input_norm for layer in layers[1:]), norm]  # by which each layer's output is normed
    for layer, next_norm in zip(layers, next_norms, strict=True):
        rope = _rope_args(layer, cos, sin, attention)
        x, heads = norm_qkv_matmul(stream, layer.input_norm, layer.eps, layer.qkv, rope)
        if layer.index in taps:
            features.append(x)
        stream = _attention_and_mlp(layer, x, heads, attention, next_norm)
    return stream.normed(norm, layers[-1].eps)[1], torch.cat(features, -1) if taps else None


def run_layer(
    layer: Layer, x: Tensor, normed: Tensor, cos: Tensor, sin: Tensor, attention: Any, norm: Tensor
) -> tuple[Tensor, Tensor]:
    """One layer: x [N, hidden] and the qkv matmul's input `normed` -> the output, and the output normed with `norm`."""
    heads = rope_and_cache(split_k_matmul(normed, layer.qkv), *_rope_args(layer, cos, sin, attention))
    return _attention_and_mlp(layer, x, heads, attention, norm).normed(norm, layer.eps)


def _rope_args(layer: Layer, cos: Tensor, sin: Tensor, attention: Any) -> RopeArgs:
    w: dict[str, Any] = layer._parameters
    norms = HeadNorms(w["q_norm"], w["k_norm"], layer.eps) if w["q_norm"] is not None else None
    return RopeArgs(w["qkv_bias"], norms, cos, sin, layer.qk_heads, attention.cache(layer.index))


def _attention_and_mlp(layer: Layer, x: Tensor, qkv: Tensor, attention: Any, next_norm: Tensor) -> ResidualStream:
    """What follows the rotated heads qkv [N, heads + 2 * kv_heads, d]: attention and MLP, each added to the stream."""
    w: dict[str, Any] = layer._parameters
    heads, kv_heads = layer.qk_heads
    mixed = attention.attend(layer.index, *qkv.split((heads, kv_heads, kv_heads), 1))
    stream = residual_matmul(x, mixed, w["o"], w["o_bias"], w["post_norm"], layer.eps)
    x, hidden = norm_gated_matmul(stream, w["post_norm"], layer.eps, w["gate_up"], w["gate_up_bias"])
    return residual_matmul(x, hidden, w["down"], w["down_bias"], next_norm, layer.eps)
