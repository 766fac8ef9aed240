"""A layer's two products that read a norm: one after the other, or both in one kernel.

One kernel is for a single row, where the table of tiles says so. A row alone is so little work that a layer takes as
long as its kernels wait for each other. Every program of a product can make the norm for itself, since that is a few
kilobytes, and so two kernels of nine are gone; a third, where queries and keys are turned, because a program takes the
two numbers that are turned together.

For a few rows, adding up is a part of the product that is added (`residual_matmul`), where the table says so, and so is
the first half of the norm: the sum times the norm's weights, and its squares. The second half, dividing by the root of
their mean, can be done to what the next product makes of it, since it is one number for a row. That is two kernels of
nine.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from paceline.kernels.fused import has_kernels
from paceline.kernels.hopper.epilogue import DeferredNorm, HeadNorms, KVRows, add_norm, rope_and_cache
from paceline.kernels.hopper.matmul import Tile, gated_matmul, split_k_matmul, tile_for


class Prenormed(NamedTuple):
    """A residual stream times the weights of the norm behind it, and what is to be done to products of it."""

    scaled: Tensor  # [rows, size]
    scale: DeferredNorm


class ResidualStream(NamedTuple):
    """A residual stream that the last product has not been added to yet."""

    x: Tensor  # [rows, size]
    parts: Tensor | None = None  # [splits, rows, size], or nothing to add
    bias: Tensor | None = None
    ready: Prenormed | None = None  # if nothing is left to add: as `residual_matmul` left it

    def normed(self, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum, and its norm."""
        parts = self.x.new_empty(0, *self.x.shape) if self.parts is None else self.parts
        return add_norm(parts, self.x, self.bias, weight, eps)


class RopeArgs(NamedTuple):
    """What makes a product the heads of a layer: as `rope_and_cache` takes it."""

    bias: Tensor | None
    norms: HeadNorms | None
    cos: Tensor
    sin: Tensor
    heads: tuple[int, int]
    cache: KVRows


def norm_qkv_matmul(
    stream: ResidualStream, norm: Tensor, eps: float, weight: Tensor, turn: RopeArgs
) -> tuple[Tensor, Tensor]:
    """-> the residual stream [rows, size], and all heads [rows, heads + 2 * kv_heads, d] as in `rope_and_cache`"""
    tile = _tile(stream.x, weight)
    if tile is not None and turn.norms is None:
        from paceline.kernels.hopper.normed_matmul_triton import norm_qkv_matmul as own

        return own(stream, norm, eps, weight, turn, tile)
    if stream.ready is not None:
        return stream.x, rope_and_cache(split_k_matmul(stream.ready.scaled, weight), *turn, stream.ready.scale)
    x, normed = stream.normed(norm, eps)
    return x, rope_and_cache(split_k_matmul(normed, weight), *turn)


def norm_gated_matmul(
    stream: ResidualStream, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-> the residual stream [rows, size], and silu(gate) * up [rows, out], as `gated_matmul` has it"""
    tile = _tile(stream.x, weight)
    if tile is not None and bias is None:
        from paceline.kernels.hopper.normed_matmul_triton import norm_gated_matmul as own

        return own(stream, norm, eps, weight, tile)
    if stream.ready is not None and bias is None and (tile := tile_for(len(stream.x), weight)) is not None:
        from paceline.kernels.hopper.matmul_triton import gated_matmul as scaled

        return stream.x, scaled(stream.ready.scaled, weight, tile, stream.ready.scale)
    x, normed = stream.normed(norm, eps)
    return x, gated_matmul(normed, weight, bias)


def residual_matmul(
    residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor, eps: float
) -> ResidualStream:
    """residual + x weight^T (+ bias), whose norm is what is read next."""
    tile = tile_for(len(x), weight) if has_kernels(x) else None
    if tile is None or not tile.added:
        return ResidualStream(residual, split_k_matmul(x, weight), bias)
    from paceline.kernels.hopper.matmul_triton import residual_matmul

    total, scaled, squares = residual_matmul(x, weight, residual, bias, norm, tile)
    return ResidualStream(total, ready=Prenormed(scaled, DeferredNorm(squares, len(norm), eps)))


def _tile(x: Tensor, weight: Tensor) -> Tile | None:
    tile = tile_for(1, weight) if len(x) == 1 and has_kernels(x) else None
    return tile if tile is not None and tile.norm else None
