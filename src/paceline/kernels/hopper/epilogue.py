"""What follows a product in a decoder layer, each as one kernel, and the same in plain PyTorch.

All take partial sums [splits, rows, out] as `kernels.product` gives them, and round where the separate operations
would: a sum of parts is a value of the model's type before anything is made of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels


class KVRows(NamedTuple):
    """Where the keys and values of a layer go."""

    k_rows: Tensor  # [places * kv_heads, d]
    v_rows: Tensor
    slots: Tensor  # int64 [rows * kv_heads]


class HeadNorms(NamedTuple):
    """Norms of queries and keys, for models that have them."""

    q: Tensor  # [d]
    k: Tensor
    eps: float


class DeferredNorm(NamedTuple):
    """What a product of rows that are normed but for their size is still to be multiplied by."""

    squares: Tensor  # float32 [parts, rows]: sums of squares, of a part of each row
    size: int
    eps: float

    def root(self) -> Tensor:
        """[rows, 1]"""
        return torch.rsqrt(self.squares.sum(0) / self.size + self.eps)[:, None]


@dispatch("hopper.epilogue_triton", lambda _, residual, *__: has_kernels(residual))
def add_norm(parts: Tensor, residual: Tensor, bias: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + product (+ bias), and its RMS norm; both [rows, out]."""
    wide = torch.promote_types(residual.dtype, torch.float32)
    total = parts.to(wide).sum(0) + residual.to(wide)
    x = (total if bias is None else total + bias.to(wide)).to(residual.dtype)
    return x, torch.rms_norm(x, (x.shape[-1],), weight, eps)


@dispatch("hopper.epilogue_triton", lambda _, bias, norms, cos, *__: has_kernels(cos))
def rope_and_cache(
    parts: Tensor,
    bias: Tensor | None,
    norms: HeadNorms | None,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    cache: KVRows,
    scale: DeferredNorm | None = None,
) -> Tensor:
    """The product of a layer's qkv -> all heads [rows, heads + 2 * kv_heads, d]: queries and keys normed and turned,
    values as they are. Keys and values are in the cache then. cos and sin: [rows, 1, d], for the model's type."""
    wide = torch.promote_types(cos.dtype, torch.float32)
    total = parts.to(wide).sum(0)
    if scale is not None:
        total = total * scale.root()
    qkv = (total if bias is None else total + bias.to(wide)).to(cos.dtype)
    q, k, v = qkv.unflatten(1, (-1, cos.shape[-1])).split((*heads, heads[1]), 1)
    if norms is not None:
        q = torch.rms_norm(q, (q.shape[-1],), norms.q, norms.eps)
        k = torch.rms_norm(k, (k.shape[-1],), norms.k, norms.eps)
    q, k = (torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin) for x in (q, k))
    cache.k_rows.index_copy_(0, cache.slots, k.flatten(0, 1))
    cache.v_rows.index_copy_(0, cache.slots, v.flatten(0, 1))
    return torch.cat((q, k, v), 1)


@dispatch("hopper.epilogue_triton", lambda _, table, __, x, *___: has_kernels(x) and table.dtype == x.dtype)
def concat_norm(tokens: Tensor, table: Tensor, table_norm: Tensor, x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """What a drafter's layer reads: the embeddings of tokens [rows] and x [rows, size], each normed, side by side."""
    size = (x.shape[-1],)
    embedded = torch.rms_norm(table[tokens].to(x.dtype), size, table_norm, eps)
    return torch.cat((embedded, torch.rms_norm(x, size, norm, eps)), -1)
