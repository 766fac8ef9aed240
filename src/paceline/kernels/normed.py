"""A layer's two products that read a norm: one after the other, or both in one kernel.

One kernel is for a single row, where the table of tiles says so. A row alone is so little work that a layer takes as
long as its kernels wait for each other. Every program of a product can make the norm for itself, since that is a few
kilobytes, and so two kernels of nine are gone; a third, where queries and keys are turned, because a program takes the
two numbers that are turned together.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from paceline.kernels.epilogue import Cache, HeadNorms, add_norm, turn_and_keep
from paceline.kernels.fused import has_kernels
from paceline.kernels.product import Tile, gated_product, split_product, tile_for


class Sum(NamedTuple):
    """A residual stream that the last product has not been added to yet."""

    x: Tensor  # [rows, size]
    parts: Tensor | None = None  # [splits, rows, size], or nothing to add
    bias: Tensor | None = None

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
    x, normed = stream.normed(norm, eps)
    return x, gated_product(normed, weight, bias)


def _tile(x: Tensor, weight: Tensor) -> Tile | None:
    tile = tile_for(1, weight) if len(x) == 1 and has_kernels(x) else None
    return tile if tile is not None and tile.norm else None
