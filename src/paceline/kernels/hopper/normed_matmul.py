"""RMSNorm and the matmul that reads it (qkv, gate_up): as separate kernels, or fused where the table of tiles says so.

A layer of nine kernels spends most of a step with few rows in waiting for its predecessors, so fewer are faster.

A single row: every program of a matmul computes the norm of the row for itself, which is a few kilobytes to read. That
saves the two norm kernels of a layer, and the rotation of queries and keys, since a program computes both dimensions of
a rotated pair.

A few rows: the matmul before the norm (`residual_matmul`) also adds the residual stream, multiplies the sum by the
norm's weights, and writes the sums of its squares. The norm's factor 1/rms is one number per row, so it can be deferred
and multiplied onto the output of the next matmul (`DeferredNorm`). That saves the two norm kernels as well.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from paceline.kernels.fused import has_kernels
from paceline.kernels.hopper.epilogue import DeferredNorm, HeadNorms, KVRows, add_norm, rope_and_cache
from paceline.kernels.hopper.matmul import Tile, gated_matmul, split_k_matmul, tile_for


class Prenormed(NamedTuple):
    """A residual stream that is normed but for its 1/rms, which the next matmul's output is multiplied by."""

    scaled: Tensor  # [rows, size]: the stream times the norm's weights
    deferred: DeferredNorm


class ResidualStream(NamedTuple):
    """A residual stream to which the last matmul may still have to be added: x + sum(parts) (+ bias)."""

    x: Tensor  # [rows, size]
    parts: Tensor | None = None  # partial sums [splits, rows, size]; None: nothing to add
    bias: Tensor | None = None
    prenormed: Prenormed | None = None  # by `residual_matmul`, which has added everything to x

    def normed(self, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum and its RMSNorm, both [rows, size]."""
        parts = self.x.new_empty(0, *self.x.shape) if self.parts is None else self.parts
        return add_norm(parts, self.x, self.bias, weight, eps)


class RopeArgs(NamedTuple):
    """What turns the output of a qkv matmul into a layer's heads: the arguments of `rope_and_cache` after `parts`."""

    bias: Tensor | None
    norms: HeadNorms | None
    cos: Tensor
    sin: Tensor
    heads: tuple[int, int]
    cache: KVRows


def norm_qkv_matmul(
    stream: ResidualStream, norm: Tensor, eps: float, weight: Tensor, rope: RopeArgs
) -> tuple[Tensor, Tensor]:
    """RMSNorm, qkv matmul, rotation and cache write -> the residual stream [rows, size], and all heads
    [rows, heads + 2 * kv_heads, d] as in `rope_and_cache`."""
    tile = _fused_tile(stream.x, weight)
    if tile is not None and rope.norms is None:
        from paceline.kernels.hopper.normed_matmul_triton import norm_qkv_matmul as kernel

        return kernel(stream, norm, eps, weight, rope, tile)
    if stream.prenormed is not None:
        scaled, deferred = stream.prenormed
        return stream.x, rope_and_cache(split_k_matmul(scaled, weight), *rope, deferred)
    x, normed = stream.normed(norm, eps)
    return x, rope_and_cache(split_k_matmul(normed, weight), *rope)


def norm_gated_matmul(
    stream: ResidualStream, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RMSNorm and gate_up matmul -> the residual stream [rows, size], and silu(gate) * up [rows, out] as in
    `gated_matmul`."""
    tile = _fused_tile(stream.x, weight)
    if tile is not None and bias is None:
        from paceline.kernels.hopper.normed_matmul_triton import norm_gated_matmul as kernel

        return kernel(stream, norm, eps, weight, tile)
    if stream.prenormed is not None and bias is None and (tile := tile_for(len(stream.x), weight)) is not None:
        from paceline.kernels.hopper.matmul_triton import gated_matmul as deferred_kernel

        return stream.x, deferred_kernel(stream.prenormed.scaled, weight, tile, stream.prenormed.deferred)
    x, normed = stream.normed(norm, eps)
    return x, gated_matmul(normed, weight, bias)


def residual_matmul(
    residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor, eps: float
) -> ResidualStream:
    """residual + x weight^T (+ bias), which the RMSNorm with weights `norm` reads next; where the tile says so, the
    first half of that norm is computed here."""
    tile = tile_for(len(x), weight) if has_kernels(x) else None
    if tile is None or not tile.residual:
        return ResidualStream(residual, split_k_matmul(x, weight), bias)
    from paceline.kernels.hopper.matmul_triton import residual_matmul as kernel

    total, scaled, squares = kernel(x, weight, residual, bias, norm, tile)
    return ResidualStream(total, prenormed=Prenormed(scaled, DeferredNorm(squares, len(norm), eps)))


def _fused_tile(x: Tensor, weight: Tensor) -> Tile | None:
    """The tile of a kernel that computes the norm itself, for a single row."""
    tile = tile_for(1, weight) if len(x) == 1 and has_kernels(x) else None
    return tile if tile is not None and tile.norm else None
