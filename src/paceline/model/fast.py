"""The decoder's layers in few kernels, for passes over a cache: decoding, checking guesses, guessing.

The same formula as `Layer.forward`, cut where a GPU would otherwise go back to memory between small operations: each
product leaves partial sums, and what follows adds them up, together with the norm that the next product reads.
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
        """Where this layer's keys and values have to be before `attend`."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As calling it, for keys and values that are in the cache."""
        ...


def applies(x: Tensor, attention: object) -> bool:
    return fuses(x) and isinstance(attention, CachedAttention)


def run_layers(
    layers: list[Layer], x: Tensor, cos: Tensor, sin: Tensor, attention: Any, norm: Tensor, taps: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """x [N, hidden] -> the last layer's output, normed, and the features of the layers `taps`, if there are any."""
    stream, features = ResidualStream(x), []
    behind = [*(layer.input_norm for layer in layers[1:]), norm]  # the norm that each layer's output is read with
    for layer, next_norm in zip(layers, behind, strict=True):
        x, heads = norm_qkv_matmul(stream, layer.input_norm, layer.eps, layer.qkv, _turn(layer, cos, sin, attention))
        if layer.index in taps:
            features.append(x)
        stream = _behind_heads(layer, x, heads, attention, next_norm)
    return stream.normed(norm, layers[-1].eps)[1], torch.cat(features, -1) if taps else None


def run_layer(
    layer: Layer, x: Tensor, normed: Tensor, cos: Tensor, sin: Tensor, attention: Any, norm: Tensor
) -> tuple[Tensor, Tensor]:
    """x [N, hidden] and what the layer reads of it -> its output, and that normed with what comes next."""
    heads = rope_and_cache(split_k_matmul(normed, layer.qkv), *_turn(layer, cos, sin, attention))
    return _behind_heads(layer, x, heads, attention, norm).normed(norm, layer.eps)


def _turn(layer: Layer, cos: Tensor, sin: Tensor, attention: Any) -> RopeArgs:
    w: dict[str, Any] = layer._parameters
    norms = HeadNorms(w["q_norm"], w["k_norm"], layer.eps) if w["q_norm"] is not None else None
    return RopeArgs(w["qkv_bias"], norms, cos, sin, layer.qk_heads, attention.cache(layer.index))


def _behind_heads(layer: Layer, x: Tensor, every: Tensor, attention: Any, next_norm: Tensor) -> ResidualStream:
    """Attention and what follows it, to where the layer's output is to be added up."""
    w: dict[str, Any] = layer._parameters
    heads, kv_heads = layer.qk_heads
    mixed = attention.attend(layer.index, *every.split((heads, kv_heads, kv_heads), 1))
    stream = residual_matmul(x, mixed, w["o"], w["o_bias"], w["post_norm"], layer.eps)
    x, hidden = norm_gated_matmul(stream, w["post_norm"], layer.eps, w["gate_up"], w["gate_up_bias"])
    return residual_matmul(x, hidden, w["down"], w["down_bias"], next_norm, layer.eps)
