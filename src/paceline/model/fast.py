"""The decoder's layers in few kernels, for passes over a cache: decoding, checking guesses, guessing.

The same formula as `Layer.forward`, cut where a GPU would otherwise go back to memory between small operations: each
product leaves partial sums, and what follows adds them up, together with the norm that the next product reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.kernels.epilogue import Cache, HeadNorms, add_norm, turn_and_keep
from paceline.kernels.fused import fuses
from paceline.kernels.product import gated_product, split_product

if TYPE_CHECKING:
    from paceline.model.decoder import Layer


@runtime_checkable
class CachedAttention(Protocol):
    def cache(self, layer: int) -> Cache:
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
    norms = [*(layer.input_norm for layer in layers), norm]
    normed = torch.rms_norm(x, (x.shape[-1],), norms[0], layers[0].eps)
    features = []
    for layer, after in zip(layers, norms[1:], strict=True):
        if layer.index in taps:
            features.append(x)
        x, normed = run_layer(layer, x, normed, cos, sin, attention, after)
    return normed, torch.cat(features, -1) if taps else None


def run_layer(
    layer: Layer, x: Tensor, normed: Tensor, cos: Tensor, sin: Tensor, attention: Any, norm: Tensor
) -> tuple[Tensor, Tensor]:
    """x [N, hidden] and what the layer reads of it -> its output, and that normed with what comes next."""
    w: dict[str, Any] = layer._parameters
    norms = HeadNorms(w["q_norm"], w["k_norm"], layer.eps) if w["q_norm"] is not None else None
    heads, kv_heads = layer.qk_heads
    cache = attention.cache(layer.index)
    every = turn_and_keep(split_product(normed, w["qkv"]), w["qkv_bias"], norms, cos, sin, layer.qk_heads, cache)
    mixed = attention.attend(layer.index, *every.split((heads, kv_heads, kv_heads), 1))
    x, normed = add_norm(split_product(mixed, w["o"]), x, w["o_bias"], w["post_norm"], layer.eps)
    hidden = gated_product(normed, w["gate_up"], w["gate_up_bias"])
    return add_norm(split_product(hidden, w["down"]), x, w["down_bias"], norm, layer.eps)
