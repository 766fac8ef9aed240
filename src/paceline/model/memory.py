"""Sizes of the decoder that memory plans are made of."""

from __future__ import annotations

from paceline.model.config import DecoderConfig


def layer_elements(shape: DecoderConfig) -> int:
    """Elements per token that a layer computes and the backward pass needs: the input and the normed input of its two
    halves; q, k and v as attention takes them, and its result; gate, up, silu(gate) and the product."""
    return 4 * shape.hidden_size + 4 * shape.heads * shape.head_dim + 4 * shape.intermediate_size
