"""What follows a matmul in a decoder layer, each as one kernel, and its reference in plain PyTorch.

All take the partial sums [splits, rows, out] of `hopper.matmul.split_k_matmul`, and round where the separate operations
would: the sum over splits is rounded to the model's type before anything else is computed from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels


class KVRows(NamedTuple):
    """Where the new keys and values of a layer are written: row slots[n * kv_heads + h] for head h of token n."""

    k_rows: Tensor  # [slots * kv_heads, d]
    v_rows: Tensor
    slots: Tensor  # int64 [rows * kv_heads]


class HeadNorms(NamedTuple):
    """RMSNorm weights of queries and keys, for models that have them."""

    q: Tensor  # [d]
    k: Tensor
    eps: float


class DeferredNorm(NamedTuple):
    """The 1/rms factor of an RMSNorm, deferred to the next matmul: 1 / sqrt(sum(squares) / size + eps) per row."""

    squares: Tensor  # float32 [parts, rows]: sums of squares, each over a part of the row
    size: int  # numbers of a row
    eps: float

    def inverse_rms(self) -> Tensor:
        """float32 [rows, 1]"""
        return torch.rsqrt(self.squares.sum(0) / self.size + self.eps)[:, None]


@dispatch("hopper.epilogue_triton", lambda _, residual, *__: has_kernels(residual))
def add_norm(parts: Tensor, residual: Tensor, bias: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x = residual + sum(parts) (+ bias) and its RMSNorm, both [rows, out]."""
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
    deferred: DeferredNorm | None = None,
) -> Tensor:
    """Partial sums of a layer's qkv matmul -> all heads [rows, heads + 2 * kv_heads, d]: queries and keys normed and
    rotated, values as they are. Keys and values are written to the cache. `heads`: (query heads, kv heads); cos and sin
    [rows, 1, d], in the model's type; `deferred`: the 1/rms that the matmul's input lacks."""
    wide = torch.promote_types(cos.dtype, torch.float32)
    total = parts.to(wide).sum(0)
    if deferred is not None:
        total = total * deferred.inverse_rms()
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
    """The input of a drafter's layer, [rows, 2 * size]: RMSNorm(table[tokens]) and RMSNorm(x) concatenated, with tokens
    [rows], x [rows, size] and a norm weight [size] each."""
    size = (x.shape[-1],)
    embedded = torch.rms_norm(table[tokens].to(x.dtype), size, table_norm, eps)
    return torch.cat((embedded, torch.rms_norm(x, size, norm, eps)), -1)
