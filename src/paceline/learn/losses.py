"""Losses per token, and the weights that make one number of them. Pure functions beside their formulas.

All tensors are flat rows over the response tokens of a batch. The weights of a whole mini-batch are known before it
is cut into micro-batches, so how it is cut changes nothing: loss = sum over tokens of weight * loss.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = p / p_old."""
    ratio = torch.exp(logp - old_logp)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def clipped(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Tokens where the clip took the gradient away."""
    ratio = torch.exp(logp - old_logp)
    return ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))


def kl_k3(logp: Tensor, reference: Tensor) -> Tensor:
    """Schulman's estimator of KL(p || reference), never negative: exp(d) - d - 1 with d = log reference - log p."""
    d = reference - logp
    return torch.exp(d) - d - 1


def importance_weights(learner_logp: Tensor, rollout_logp: Tensor, cap: float) -> Tensor:
    """min(p_learner / p_rollout, cap): what makes up for the engine and the learner rounding differently."""
    return torch.exp(learner_logp - rollout_logp).clamp(max=cap)


Aggregate = Literal["sequence_mean", "sequence_sum", "token_mean", "constant"]


def token_weights(lengths: Tensor, how: Aggregate, max_tokens: int) -> Tensor:
    """Weight of each token [sum(lengths)] of answers with these lengths [answers].

    sequence_mean  1 / (answers * length)        GRPO: every answer counts the same
    token_mean     1 / tokens                    DAPO: every token counts the same
    constant       1 / (answers * max_tokens)    Dr. GRPO: no length enters at all
    sequence_sum   1 / answers                   RLOO: the log-probability of a whole answer
    """
    n = len(lengths)
    each = {
        "sequence_mean": 1.0 / (n * lengths.double()),
        "token_mean": torch.full((n,), 1.0 / int(lengths.sum()), dtype=torch.float64),
        "constant": torch.full((n,), 1.0 / (n * max_tokens), dtype=torch.float64),
        "sequence_sum": torch.full((n,), 1.0 / n, dtype=torch.float64),
    }[how]
    return each.repeat_interleave(lengths)
