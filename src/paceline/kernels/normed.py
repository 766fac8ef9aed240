"""A layer's two products that read a norm: one after the other, or both in one kernel.

One kernel is for a single row, where the table of tiles says so. A row alone is so little work that a layer takes as
long as its kernels wait for each other. Every program of a product can make the norm for itself, since that is a few
kilobytes, and so two kernels of nine are gone; a third, where queries and keys are turned, because a program takes the
two numbers that are turned together.

For a few rows, adding up is a part of the product that is added (`add_product`), where the table says so, and so is the
first half of the norm: the sum times the norm's weights, and its squares. The second half, dividing by the root of
their mean, can be done to what the next product makes of it, since it is one number for a row. That is two kernels of
nine.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from paceline.kernels.epilogue import Cache, HeadNorms, Scale, add_norm, turn_and_keep
from paceline.kernels.fused import has_kernels
from paceline.kernels.product import Tile, gated_product, split_product, tile_for


class Ready(NamedTuple):
    """A residual stream times the weights of the norm behind it, and what is to be done to products of it."""

    scaled: Tensor  # [rows, size]
    scale: Scale


class Sum(NamedTuple):
    """A residual stream that the last product has not been added to yet."""

    x: Tensor  # [rows, size]
    parts: Tensor | None = None  # [splits, rows, size], or nothing to add
    bias: Tensor | None = None
    ready: Ready | None = None  # if nothing is left to add: as `add_product` left it

    def normed(self, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum, and its norm."""
        parts = self.x.new_empty(0, *self.x.shape) if self.parts is None else self.parts
        return add_norm(parts, self.x, self.bias, weight, eps)


class Turn(NamedTuple):
    """What makes a product the heads of a layer: as `turn_and_keep` takes it."""

    bias: Tensor | None
    norms: HeadNorms | None
    cos: Tensor
    sin: Tensor
    heads: tuple[int, int]
    cache: Cache


def norm_heads(stream: Sum, norm: Tensor, eps: float, weight: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """-> the residual stream [rows, size], and all heads [rows, heads + 2 * kv_heads, d] as `turn_and_keep` has them"""
    tile = _tile(stream.x, weight)
    if tile is not None and turn.norms is None:
        from paceline.kernels.normed_triton import norm_heads as own

        return own(stream, norm, eps, weight, turn, tile)
    if stream.ready is not None:
        return stream.x, turn_and_keep(split_product(stream.ready.scaled, weight), *turn, stream.ready.scale)
    x, normed = stream.normed(norm, eps)
    return x, turn_and_keep(split_product(normed, weight), *turn)


def norm_gated(
    stream: Sum, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-> the residual stream [rows, size], and silu(gate) * up [rows, out], as `gated_product` has it"""
    tile = _tile(stream.x, weight)
    if tile is not None and bias is None:
        from paceline.kernels.normed_triton import norm_gated as own

        return own(stream, norm, eps, weight, tile)
    if stream.ready is not None and bias is None and (tile := tile_for(len(stream.x), weight)) is not None:
        from paceline.kernels.product_triton import gated_product as scaled

        return stream.x, scaled(stream.ready.scaled, weight, tile, stream.ready.scale)
    x, normed = stream.normed(norm, eps)
    return x, gated_product(normed, weight, bias)


def add_product(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor, eps: float) -> Sum:
    """residual + x weight^T (+ bias), whose norm is what is read next."""
    tile = tile_for(len(x), weight) if has_kernels(x) else None
    if tile is None or not tile.added:
        return Sum(residual, split_product(x, weight), bias)
    from paceline.kernels.product_triton import added_product

    total, scaled, squares = added_product(x, weight, residual, bias, norm, tile)
    return Sum(total, ready=Ready(scaled, Scale(squares, len(norm), eps)))


def _tile(x: Tensor, weight: Tensor) -> Tile | None:
    tile = tile_for(1, weight) if len(x) == 1 and has_kernels(x) else None
    return tile if tile is not None and tile.norm else None
