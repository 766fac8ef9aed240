"""Advantages: how much better an answer was than could be expected. Pure functions beside their formulas.

Group methods take rewards [groups, samples] and give one number per answer; REINFORCE++ gives one per token. They use
methods of tensors only, so that settings are checked against the table of algorithms without waiting for torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

STD_EPS = 1e-4  # added to the standard deviation: keeps groups of nearly equal rewards from exploding
VAR_EPS = 1e-8  # added to the variance over all tokens, which is hardly ever small


def grpo(rewards: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + eps), over the group (DeepSeekMath, also DAPO)."""
    centred = rewards - rewards.mean(-1, keepdim=True)
    if rewards.shape[-1] == 1:
        return centred
    return centred / (rewards.std(-1, keepdim=True) + STD_EPS)


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

    rewards of all answers, lengths [answers], kl [tokens] of all answers end to end -> [tokens].
    """
    returns = rewards.flatten().repeat_interleave(lengths)
    if kl is not None and kl_coef:
        to_go = kl.clone()
        for part in to_go.split(lengths.tolist()):
            part.copy_(part.flip(0).cumsum(0).flip(0))
        returns = returns - kl_coef * to_go
    if len(returns) == 1:
        return returns - returns.mean()
    return (returns - returns.mean()) * (returns.var() + VAR_EPS).rsqrt()


TokenAdvantage = Callable[["Tensor", "Tensor", "Tensor | None", float], "Tensor"]
"""(rewards [groups, samples], lengths [answers], kl [tokens] to the reference or None, kl_coef) -> [tokens]."""


def per_answer(advantage: Callable[[Tensor], Tensor]) -> TokenAdvantage:
    """Give every token of an answer the answer's advantage. Groups of equal rewards have none."""

    def per_token(rewards: Tensor, lengths: Tensor, kl: Tensor | None, kl_coef: float) -> Tensor:
        each = advantage(rewards)
        if rewards.shape[1] > 1:  # a lone answer may have one; what others have left of equal rewards is rounding
            each = each * mixed(rewards)[:, None]
        return each.view(-1).repeat_interleave(lengths)

    return per_token


Turns = tuple[tuple[int, float], ...]
"""Of an answer: tokens of each turn, and its own reward, which is a part of the answer's."""


def by_turn(rewards: Tensor, turns: list[Turns], advantage: TokenAdvantage) -> list[Tensor]:
    """Give every token the advantage of its turn's return, R_t = r - sum_{s<t} r_s: what the answer got (r), less what
    came before the turn. It is compared with the returns of the same turn of the group's other answers that have one.

    rewards [groups, samples] -> a tensor per answer."""
    import torch  # settings are checked against the algorithms without waiting for it

    samples = rewards.shape[1]
    out: list[Tensor] = []
    for g in range(len(rewards)):
        answers = turns[g * samples : (g + 1) * samples]
        parts: list[list[Tensor]] = [[] for _ in answers]
        for t in range(max(map(len, answers))):
            rows = [i for i, answer in enumerate(answers) if len(answer) > t]
            before = [sum(own for _, own in answers[i][:t]) for i in rows]
            returns = rewards[g, rows] - rewards.new_tensor(before)
            each = advantage(returns[None], returns.new_ones(len(rows)).long(), None, 0.0)
            for i, one in zip(rows, each, strict=True):
                parts[i].append(one.repeat(answers[i][t][0]))
        out += [torch.cat(one) for one in parts]
    return out


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """DAPO's soft punishment: 0 up to max_tokens - buffer, then linear, down to -penalty at max_tokens."""
    if buffer == 0:
        return lengths.double() * 0.0
    over = (lengths.double() - (max_tokens - buffer)) / buffer
    return -penalty * over.clamp(0, 1)


def mixed(rewards: Tensor) -> Tensor:
    """Which groups [groups] have answers of different reward: only those have an advantage."""
    return rewards.max(-1).values > rewards.min(-1).values
