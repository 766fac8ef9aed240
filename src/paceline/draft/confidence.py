"""Which draft tokens of a batch are verified, where requests share a budget: those that are likeliest to be accepted.

A draft token counts only behind accepted ones, so its worth is the product of the acceptance rates of its chain up to
it. The rate of one comes from the probability that the drafter gave it, calibrated: how often draft tokens of about
that probability were accepted lately. Under known noise the choice changes no token, whatever it depends on.

Everything stays on the device, in tensors of fixed shapes: a round can be part of a captured graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.positions import up_to

BINS = 32
BINS_PER_OCTAVE = 2  # of -log q, from SUREST on
SUREST = 2.0**-12  # -log q of the first bin
PRIOR_COUNT = 16.0  # draft tokens that say as much as the drafter's own probability
FADE_PER_ROUND = 0.998
IN_ORDER = 1e-3  # taken off at each level, so that no draft token comes before its parent


class SharedRows(NamedTuple):
    """The rows of a pass over B requests and N of their draft tokens: the last token of each request, then those."""

    request: Tensor  # int64 [B + N]
    level: Tensor  # int64 [B + N] 0 for a request's last token, i + 1 for draft token i
    flat: Tensor  # int64 [B + N] their index in [B, 1 + depth] flattened
    chosen: Tensor  # bool [B, 1 + depth] which of those are verified


def share_rows(log_rates: Tensor, present: Tensor, count: int) -> SharedRows:
    """Choose `count` draft tokens from chains with these log acceptance rates [B, depth]; requests that are not
    `present` [B] come last."""
    batch, depth = log_rates.shape
    device = log_rates.device
    score = log_rates.cumsum(1) - IN_ORDER * up_to(depth, device)
    score = score.masked_fill(~present[:, None], -torch.inf)
    best = score.flatten().topk(count, sorted=False).indices.sort().values
    request = torch.cat((up_to(batch, device), best // depth))
    level = torch.cat((torch.zeros_like(up_to(batch, device)), best % depth + 1))
    index = request * (depth + 1) + level
    chosen = torch.zeros(batch * (depth + 1), dtype=torch.bool, device=device)
    chosen.index_fill_(0, index, True)
    return SharedRows(request, level, index, chosen.view(batch, -1))


class Calibration:
    """How often draft tokens are accepted, by the log-probability that the drafter gave them."""

    def __init__(self, device: torch.device):
        centres = SUREST * 2.0 ** ((torch.arange(BINS, device=device) + 0.5) / BINS_PER_OCTAVE)
        self._usual = (-centres).exp()  # [BINS] where nothing is known, the probability itself
        self.reached = torch.zeros(BINS, device=device)
        """Draft tokens verified behind accepted ones, with older rounds fading."""
        self.accepted = torch.zeros(BINS, device=device)
        """Those of them that were accepted."""

    def bins(self, log_probs: Tensor) -> Tensor:
        octaves = (-log_probs.float()).clamp(min=SUREST).div(SUREST).log2()
        return (octaves * BINS_PER_OCTAVE).long().clamp_(max=BINS - 1)

    def log_rates(self, log_probs: Tensor) -> Tensor:
        """Of draft tokens with these log-probabilities, of any shape."""
        rates = (self.accepted + PRIOR_COUNT * self._usual) / (self.reached + PRIOR_COUNT)
        return rates.log()[self.bins(log_probs)]

    def observe(self, log_probs: Tensor, chosen: Tensor, num_accepted: Tensor, present: Tensor) -> None:
        """Of chains with log-probabilities [B, depth] those that are `chosen` [B, depth] were verified, and so many
        accepted [B]."""
        level = up_to(log_probs.shape[1], log_probs.device)
        reached = chosen & (level <= num_accepted[:, None]) & present[:, None]
        accepted = reached & (level < num_accepted[:, None])
        bins = self.bins(log_probs).flatten()
        for counts, seen in ((self.reached, reached), (self.accepted, accepted)):
            counts.mul_(FADE_PER_ROUND).index_add_(0, bins, seen.flatten().to(counts.dtype))
