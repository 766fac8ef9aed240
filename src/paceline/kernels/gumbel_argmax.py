"""The race over the vocabulary: argmax_v(logit_v / T + gumbel_v), and the log-probability of the winner.

Rows of logits belong to requests, T each: `level` says how far ahead of its request's first place each one lies. Rows
with temperature 0 race without noise. Tokens may be banned for a number of places. On a GPU the noise is made on the
way and never written out; here is the same in plain PyTorch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.dispatch import dispatch
from paceline.kernels.fused import has_kernels
from paceline.kernels.noise import gumbel, position_keys


class Bans(NamedTuple):
    """Tokens that cannot win yet, where every token has its column."""

    tokens: Tensor  # int32 [B, n]; -1: none
    left: Tensor  # int32 [B] places ahead of which they are banned

    def apply(self, scores: Tensor, further: Tensor) -> Tensor:
        """Scores [B * T, V] of places that lie so much `further` ahead, int [B, T]."""
        early = (self.left[:, None] > further)[..., None]
        index = torch.where(early, self.tokens[:, None], -1).flatten(0, 1).long()
        at = index.clamp(min=0)
        return scores.scatter(-1, at, torch.where(index >= 0, -torch.inf, scores.gather(-1, at)))


@dispatch("gumbel_argmax_triton", lambda logits, *_: has_kernels(logits))
def gumbel_argmax(
    logits: Tensor,
    keys: Tensor,
    places: Tensor,
    temperature: Tensor,
    level: Tensor | None = None,
    ids: Tensor | None = None,
    noise: bool = True,
    logprobs: bool = True,
    ahead: int = 0,
    bans: Bans | None = None,
) -> tuple[Tensor, Tensor]:
    """logits [B * T, V]; keys int64, places int and temperature [B]; level int [B, T], where T > 1; ids int64 [V], the
    token of each column, where that is not its number; `ahead` is added to all places -> the winning tokens int64
    [B * T] and their log-probabilities at this temperature (at 1 for temperature 0) with nothing banned, or zeros where
    they are not asked for."""
    assert ids is None or bans is None, "bans name columns"
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    batch = len(keys)
    each = logits.shape[0] // batch
    further = torch.zeros(batch, 1, dtype=torch.int64, device=keys.device) if level is None else level
    greedy = (temperature == 0)[:, None].expand(-1, each).reshape(-1, 1)
    cool = torch.where(temperature == 0, 1.0, temperature).to(wide)[:, None].expand(-1, each).reshape(-1, 1)
    scaled = logits.to(wide) / cool
    scores = scaled
    if noise:
        known = position_keys(keys[:, None], places[:, None] + further + ahead).reshape(-1)
        most = logits.shape[1] if ids is None else int(ids.max()) + 1
        drawn = gumbel(known, most, wide)
        scores = torch.where(greedy, scaled, scaled + (drawn if ids is None else drawn[:, ids]))
    if bans is not None:
        scores = bans.apply(scores, further)
    column = scores.argmax(-1)
    logprob = scaled.log_softmax(-1).gather(-1, column[:, None])[:, 0] if logprobs else scaled.new_zeros(len(scaled))
    return column if ids is None else ids[column], logprob
