"""Sampling with known noise: argmax_v(logit_v / T + gumbel_v) over the vocabulary, and the winner's log-probability.

Each request has T rows of logits, one per tree node. Row t is for the position positions[b] + depth[b, t] + ahead,
whose noise is a function of the request's key and that position (`kernels.noise`). Temperature 0 is greedy: no noise.
On a GPU the noise is made in registers and never written to memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels
from paceline.kernels.noise import gumbel, position_keys


class Bans(NamedTuple):
    """Tokens that may not be sampled before the minimum length is reached."""

    tokens: Tensor  # int32 [B, n]; -1: none
    remaining: Tensor  # int32 [B]: positions for which they stay banned, counted from depth 0

    def apply(self, scores: Tensor, depth: Tensor) -> Tensor:
        """Scores [B * T, V] with -inf for the banned tokens of rows whose depth int [B, T] is below `remaining`."""
        banned = (self.remaining[:, None] > depth)[..., None]
        index = torch.where(banned, self.tokens[:, None], -1).flatten(0, 1).long()
        at = index.clamp(min=0)
        return scores.scatter(-1, at, torch.where(index >= 0, -torch.inf, scores.gather(-1, at)))


@dispatch("gumbel_argmax_triton", lambda logits, *_: has_kernels(logits))
def gumbel_argmax(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    temperature: Tensor,
    depth: Tensor | None = None,
    ids: Tensor | None = None,
    noise: bool = True,
    logprobs: bool = True,
    ahead: int = 0,
    bans: Bans | None = None,
) -> tuple[Tensor, Tensor]:
    """logits [B * T, V]; keys int64, positions int and temperature [B]; depth int [B, T], needed where T > 1; ids int64
    [V], the token of each column where the vocabulary is a subset; `ahead` is added to all positions -> the sampled
    tokens int64 [B * T] and their log-probabilities at this temperature (at 1 where it is 0), bans not applied; zeros
    if `logprobs` is false."""
    assert ids is None or bans is None, "bans name columns"
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    batch = len(keys)
    nodes = logits.shape[0] // batch
    offset = torch.zeros(batch, 1, dtype=torch.int64, device=keys.device) if depth is None else depth
    greedy = (temperature == 0)[:, None].expand(-1, nodes).reshape(-1, 1)
    divisor = torch.where(temperature == 0, 1.0, temperature).to(wide)[:, None].expand(-1, nodes).reshape(-1, 1)
    scaled = logits.to(wide) / divisor
    scores = scaled
    if noise:
        row_keys = position_keys(keys[:, None], positions[:, None] + offset + ahead).reshape(-1)
        vocab = logits.shape[1] if ids is None else int(ids.max()) + 1
        added = gumbel(row_keys, vocab, wide)
        scores = torch.where(greedy, scaled, scaled + (added if ids is None else added[:, ids]))
    if bans is not None:
        scores = bans.apply(scores, offset)
    column = scores.argmax(-1)
    logprob = scaled.log_softmax(-1).gather(-1, column[:, None])[:, 0] if logprobs else scaled.new_zeros(len(scaled))
    return column if ids is None else ids[column], logprob
