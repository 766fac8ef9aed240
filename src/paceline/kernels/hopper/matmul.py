"""Matmuls of a few rows: by cuBLAS, by cuBLASLt, or by our own kernel where it was measured to be faster.

`split_k_matmul` gives partial sums [splits, rows, out], which `hopper.epilogue` adds up; a library gives one, already
rounded. Weights are [out, in], as in checkpoints.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.constants import constant
from paceline.kernels.fused import has_kernels
from paceline.kernels.hopper.tile_files import read_tile_file

ROW_BUCKETS = (1, 8, 16, 32, 64, 112, 128, 176)
"""Numbers of rows that tiles are tuned for; others use the next larger one. A single row needs no tensor cores, powers
of two are their tile sizes, and 112 and 176 are the most rows for which cuBLASLt's choices were faster."""


@dataclass(frozen=True)
class Tile:
    """How a kernel divides a matmul into programs, and what else it fuses with it."""

    block_n: int = 64
    """Rows of the weight (columns of the output) per program."""
    block_k: int = 128
    """Columns of the weight per iteration."""
    splits: int = 1
    """Programs that the inner dimension is divided over; each gives a partial sum."""
    warps: int = 4
    stages: int = 4
    weight_first: bool = True
    """Whether the weights are the first operand of the tensor cores, which then read them from shared memory."""
    vector: bool = False
    """Without tensor cores; for a single row."""
    gated: bool = False
    """For a gate_up weight, both halves of which a program reads."""
    preload: bool = False
    """Whether a program loads its first block of weights before it waits for its predecessor; for weights that are the
    first operand, not with `gated`."""
    unroll: int = 1
    """For a single row: iterations whose loads are issued together."""
    norm: bool = False
    """Whether the RMSNorm before the matmul is fused with it (`hopper.normed_matmul`); for a single row."""
    residual: bool = False
    """Whether the addition to the residual stream and the first half of the RMSNorm after it are fused with the matmul
    (`hopper.normed_matmul.residual_matmul`); without splits, for several rows."""
    blocks: int = 1
    """With `gated` and `norm`: blocks of block_n rows that a program computes one after the other with one norm."""
    cublaslt: bool = False
    """No kernel of ours but cuBLASLt's choice, where it is better than cuBLAS's; not with `gated`."""


TileTable = dict[tuple[int, int, int], Tile]
"""By rows (one of ROW_BUCKETS), out and in; for a gate_up weight, `out` counts both halves."""

TUNED_CAPABILITY = (9, 0)
"""CUDA compute capability that the tiles were measured on: Hopper. Other devices use cuBLAS."""


def read_matmul_tiles(file: Path) -> TileTable:
    entries = read_tile_file(file)["tiles"]
    return {(e["rows"], e["out"], e["in"]): Tile(**e["tile"]) for e in entries}


TILES_FILE = Path(__file__).with_name("tiles.json")
"""Two tables, written by benchmarks/tune_products.py and tune_steps.py on an H200: "tiles" of matmuls, where a tile was
measured to beat cuBLAS, and "attention" (`paged_attention_triton.ATTENTION_TILES`)."""
MATMUL_TILES = read_matmul_tiles(TILES_FILE)
"""The table in use. Shapes that are not in it go to cuBLAS."""


@functools.cache
def _is_tuned(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == TUNED_CAPABILITY


def tile_for(rows: int, weight: Tensor) -> Tile | None:
    """The tile of x [rows, in] times weight [out, in], or None for cuBLAS."""
    if rows > ROW_BUCKETS[-1] or weight.dtype != torch.bfloat16 or not _is_tuned(weight.device):
        return None
    out, size = weight.shape
    return MATMUL_TILES.get((ROW_BUCKETS[bisect_left(ROW_BUCKETS, rows)], out, size))


def split_k_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] times weight [out, in] -> partial sums [splits, rows, out]"""
    return matmul_with(tile_for(len(x), weight) if has_kernels(x) else None, x, weight)


def matmul_with(tile: Tile | None, x: Tensor, weight: Tensor) -> Tensor:
    """`split_k_matmul` with a given tile, or with cuBLAS for None."""
    if tile is None:
        return torch.mm(x, weight.t())[None]
    if tile.cublaslt:  # PyTorch calls cuBLASLt where a bias is added
        return torch.addmm(_no_bias(len(weight), weight.dtype, weight.device), x, weight.t())[None]
    from paceline.kernels.hopper.matmul_triton import split_k_matmul as kernel

    return kernel(x, weight, tile)


@constant
def _no_bias(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


def gated_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in], weight [2 * size, in], the rows of gate before those of up -> silu(gate) * up, [rows, size]"""
    tile = tile_for(len(x), weight) if has_kernels(x) and bias is None else None
    if tile is not None:
        from paceline.kernels.hopper.matmul_triton import gated_matmul as kernel

        return kernel(x, weight, tile)
    gate_up = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    if has_kernels(x):
        from paceline.kernels.fused_triton import gated

        return gated(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
