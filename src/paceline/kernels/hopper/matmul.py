"""Which way a product of a few rows goes: cuBLAS, cuBLASLt, or our own kernel where it was measured to be faster.

`split_k_matmul` gives partial sums [splits, rows, out] for the epilogues of `kernels.epilogue` to add up; where a
library makes the product there is one, already rounded. Weights are [out, in], as checkpoints have them.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.constants import constant
from paceline.kernels.fused import has_kernels

ROWS = (1, 8, 16, 32, 64, 112, 128, 176)
"""Numbers of rows that are told apart: the tiles of the matrix units, a row alone, and up to which cuBLASLt is fast."""


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts a product up."""

    block_n: int = 64
    block_k: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4
    weight_first: bool = True
    """Whether the weights are the first operand of the matrix units, which then take them from shared memory."""
    vector: bool = False
    """Without matrix units; for a single row."""
    gated: bool = False
    """For a matrix with gates, whose halves are read side by side."""
    ahead: bool = False
    """Whether a program takes its first weights before its turn, which they do not depend on; for weights that are the
    first operand, and not for gates."""
    unroll: int = 1
    """For a single row, blocks of weights that a program asks for at once."""
    norm: bool = False
    """Whether the norm in front of the product is a part of it (`kernels.normed`); for a single row."""
    added: bool = False
    """Whether what the product is added to, and the first half of the norm behind it, are a part of it
    (`kernels.normed.add_product`); without splits, for several rows."""
    turns: int = 1
    """With gates and a norm, blocks that a program makes one after the other, all with the norm that it made once."""
    library: bool = False
    """No kernel of ours but cuBLASLt's choice, where it is a better one than cuBLAS's; not for gates."""


Table = dict[tuple[int, int, int], Tile]
"""By rows (one of ROWS), out and in; for products with gates, out is the size of the whole matrix."""

HOPPER = (9, 0)


def read_tiles(file: Path) -> Table:
    entries = json.loads(file.read_text())["tiles"]
    return {(e["rows"], e["out"], e["in"]): Tile(**e["tile"]) for e in entries}


SHIPPED = Path(__file__).with_name("tiles.json")
TILES = read_tiles(SHIPPED)
"""Measured on an H200 by benchmarks/tune_products.py and tune_steps.py; what is not here goes to cuBLAS, and so do
other cards."""


@functools.cache
def _known(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER


def tile_for(rows: int, weight: Tensor) -> Tile | None:
    if rows > ROWS[-1] or weight.dtype != torch.bfloat16 or not _known(weight.device):
        return None
    out, size = weight.shape
    return TILES.get((ROWS[bisect_left(ROWS, rows)], out, size))


def split_k_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] times weight [out, in] -> partial sums [splits, rows, out]"""
    return split_as(tile_for(len(x), weight) if has_kernels(x) else None, x, weight)


def split_as(tile: Tile | None, x: Tensor, weight: Tensor) -> Tensor:
    """`split_k_matmul` as a tile says, or as cuBLAS does it."""
    if tile is None:
        return torch.mm(x, weight.t())[None]
    if tile.library:  # PyTorch asks cuBLASLt where a bias is added
        return torch.addmm(_no_bias(len(weight), weight.dtype, weight.device), x, weight.t())[None]
    from paceline.kernels.hopper.matmul_triton import split_k_matmul as own

    return own(x, weight, tile)


@constant
def _no_bias(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


def gated_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in], weight [2 * size, in], gate above up -> silu(gate) * up, [rows, size]"""
    tile = tile_for(len(x), weight) if has_kernels(x) and bias is None else None
    if tile is not None:
        from paceline.kernels.hopper.matmul_triton import gated_matmul as own

        return own(x, weight, tile)
    both = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    if has_kernels(x):
        from paceline.kernels.fused_triton import gated

        return gated(both)
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up
