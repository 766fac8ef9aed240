"""Sampling with known noise.

The token at a position is argmax_v(logit_v / T + gumbel_v) over the tokens that the filters keep, with the noise of
`kernels.noise`. There is no generator to keep in step: whoever computes the same logits draws the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.fused import has_kernels
from paceline.kernels.gumbel_argmax import Bans, gumbel_argmax
from paceline.kernels.noise import noise_ahead, noise_dtype
from paceline.rollout.filters import Filters

AT_ONCE = 1 << 25  # scores that are filtered at once: sorting takes several times their memory


@dataclass
class SamplingRows:
    """Sampling parameters of a batch, a row per request."""

    keys: Tensor  # int64 [B] request keys
    temperature: Tensor  # float32 [B]
    top_k: Tensor  # int32 [B]
    top_p: Tensor  # float32 [B]
    min_p: Tensor  # float32 [B]
    min_left: Tensor  # int32 [B] tokens until the completion may end
    banned: Tensor  # int32 [B, 8] tokens that would end it, padded with repeats; -1 throughout where there are none

    def part(self, first: int, last: int) -> SamplingRows:
        return SamplingRows(*(x[first:last] for x in vars(self).values()))

    def spread(self, depth: Tensor) -> SamplingRows:
        """The parameters of tree nodes [B * T], which lie `depth` [B, T] tokens ahead of each request."""

        def each(x: Tensor) -> Tensor:
            return x[:, None].expand(-1, depth.shape[1], *x.shape[1:]).flatten(0, 1)

        left = (self.min_left[:, None] - depth).flatten()
        keys, temperature, top_k = each(self.keys), each(self.temperature), each(self.top_k)
        return SamplingRows(keys, temperature, top_k, each(self.top_p), each(self.min_p), left, each(self.banned))


def draw(
    logits: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    filters: Filters,
    noise: Callable[[], Tensor],
    level: Tensor | None = None,
    ahead: int = 0,
) -> tuple[Tensor, Tensor]:
    """Sample the tokens `ahead` of `positions` [B], or of the nodes of trees `level` [B, T] behind those, as
    `gumbel_argmax` does. `noise` is called where it has to be materialized: a GPU kernel makes its own, unless
    something is sorted."""
    if has_kernels(logits) and filters < Filters.SORTS:
        bans = Bans(rows.banned, rows.min_left) if filters else None
        return gumbel_argmax(logits, rows.keys, positions, rows.temperature, level, ahead=ahead, bans=bans)
    return filtered_gumbel_argmax(logits, rows if level is None else rows.spread(level), noise(), filters)


def filtered_gumbel_argmax(
    logits: Tensor, rows: SamplingRows, noise: Tensor, filters: Filters
) -> tuple[Tensor, Tensor]:
    """Draw tokens from `logits` with `noise`, both [B, V] -> tokens [B], log-probabilities [B].
    `filters` is the most that any row uses beside its temperature; it changes no row that does not.

    The log-probability is that of the policy at this temperature, before filters, which is what a learner compares
    with; for greedy rows it is the one at temperature 1.
    """
    count = len(logits)
    some = max(1, AT_ONCE // logits.shape[1])
    if not filters or count <= some:
        return _filtered_gumbel_argmax(logits, rows, noise, filters)
    parts = [(first, first + some) for first in range(0, count, some)]
    drawn = [_filtered_gumbel_argmax(logits[a:b], rows.part(a, b), noise[a:b], filters) for a, b in parts]
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([logprobs for _, logprobs in drawn])


def _filtered_gumbel_argmax(
    logits: Tensor, rows: SamplingRows, noise: Tensor, filters: Filters
) -> tuple[Tensor, Tensor]:
    wide = noise_dtype(logits.dtype)
    greedy = rows.temperature == 0
    scaled = logits.to(wide) / torch.where(greedy, 1.0, rows.temperature).to(wide)[:, None]
    scores = keep(scaled, rows, filters) if filters else scaled
    tokens = torch.where(greedy[:, None], scores, scores + noise).argmax(-1)
    logprobs = scaled.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return tokens, logprobs


class NoiseAhead:
    """The noise of a batch, computed for a few positions at a time while the batch stays as it is.

    Making noise is some thirty operations on few numbers. A GPU hides them in a graph; for a small model on a CPU
    they would be a tenth of a step, so small batches there prepare several positions at once: twice as many each time,
    because a single plain round among others would throw the rest away."""

    BLOCK = 4096  # numbers per block: beyond this, making noise is no longer a matter of overhead
    MOST = 16  # positions

    def __init__(self, vocab: int, dtype: torch.dtype):
        self.vocab = vocab
        self.dtype = noise_dtype(dtype)
        self._block: list[Tensor] = []
        self._count = 1  # positions of the next block

    def forget(self) -> None:
        self._block = []
        self._count = 1

    def next(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Noise [B, V] of the requests `keys` at `positions`, which must be one past the last call's (or `forget`)."""
        if not self._block:
            count = 1 if keys.is_cuda else max(1, min(self._count, self.BLOCK // (len(keys) * self.vocab)))
            self._block = list(noise_ahead(keys, positions, count, self.vocab, self.dtype).unbind(1))[::-1]
            self._count = min(2 * self._count, self.MOST)
        return self._block.pop()


def keep(scaled: Tensor, rows: SamplingRows, filters: Filters) -> Tensor:
    """Set the scores of tokens that the filters drop to -inf. Neutral parameters drop nothing."""
    scaled = Bans(rows.banned, rows.min_left).apply(scaled, torch.zeros_like(rows.min_left)[:, None])
    if filters < Filters.SORTS:
        return scaled
    vocab = scaled.shape[-1]
    best = scaled.sort(-1, descending=True).values
    k = torch.where(rows.top_k == 0, vocab, rows.top_k.clamp(max=vocab)).long()[:, None]
    rank = torch.arange(vocab, device=scaled.device)
    best = best.masked_fill(rank >= k, -torch.inf)
    before = best.softmax(-1).cumsum(-1).roll(1, -1)  # probability of the tokens ahead of each rank
    before[:, 0] = 0.0
    # 1 means all: a rounded sum must not drop the last tokens of a row that does not use the filter.
    top_p = torch.where(rows.top_p < 1, rows.top_p, torch.inf)[:, None]
    nucleus = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    last = best.gather(-1, torch.minimum(nucleus, k) - 1)
    floor = best[:, :1] + rows.min_p.to(best.dtype).log()[:, None]
    return scaled.masked_fill(scaled < torch.maximum(last, floor), -torch.inf)
