"""Advantages: how much better an answer was than could be expected. Pure functions beside their formulas.

Group methods take rewards [groups, samples] and give one number per answer; REINFORCE++ gives one per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-4  # keeps groups of nearly equal rewards from exploding


def grpo(rewards: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + eps), over the group (DeepSeekMath, also DAPO)."""
    centred = rewards - rewards.mean(-1, keepdim=True)
    if rewards.shape[-1] == 1:
        return centred
    return centred / (rewards.std(-1, keepdim=True) + EPS)


def dr_grpo(rewards: Tensor) -> Tensor:
    """A_i = r_i - mean(r): without the division that favours groups of nearly equal rewards (Dr. GRPO)."""
    return rewards - rewards.mean(-1, keepdim=True)


def rloo(rewards: Tensor) -> Tensor:
    """A_i = r_i - mean of the others in the group (REINFORCE leave-one-out)."""
    n = rewards.shape[-1]
    if n == 1:
        return rewards
    return rewards - (rewards.sum(-1, keepdim=True) - rewards) / (n - 1)


def reinforce_pp(rewards: Tensor, lengths: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """REINFORCE++: the return from token t on, R_t = r - kl_coef * sum_{s>=t} kl_s, whitened over all tokens.

    rewards and lengths [answers], kl [tokens] of all answers end to end -> [tokens].
    """
    returns = rewards.repeat_interleave(lengths)
    if kl is not None and kl_coef:
        to_go = [part.flip(0).cumsum(0).flip(0) for part in kl.split(lengths.tolist())]
        returns = returns - kl_coef * torch.cat(to_go)
    if len(returns) == 1:
        return returns - returns.mean()
    return (returns - returns.mean()) * torch.rsqrt(returns.var() + 1e-8)


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """DAPO's soft punishment: 0 up to max_tokens - buffer, then linear, down to -penalty at max_tokens."""
    if buffer == 0:
        return torch.zeros(lengths.shape, dtype=torch.float64)
    over = (lengths.double() - (max_tokens - buffer)) / buffer
    return -penalty * over.clamp(0, 1)


def mixed(rewards: Tensor) -> Tensor:
    """Which groups [groups] have answers of different reward: the only ones that teach anything."""
    return rewards.max(-1).values > rewards.min(-1).values
