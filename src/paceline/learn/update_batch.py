"""What a step is learned from: its trajectories with their advantages, and the updates that they are dealt into.

It is the same for all learners that share the work, because it depends on rewards, lengths and scores alone: tokens are
needed only of those trajectories that a learner makes the gradients of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.config import Config, LearnConfig
from paceline.core import Trajectories, mix_seed
from paceline.learn.advantages import Turns, by_turn, overlong_penalty
from paceline.learn.algorithms import ALGORITHMS

BACKWARD_COST = 2  # times the forward pass: gradients of the inputs and of the weights


class Score(NamedTuple):
    """Log-probabilities [tokens] of an answer before the step's first update, where they are needed."""

    old: Tensor | None
    reference: Tensor | None


@dataclass
class UpdateBatch:
    trajectories: Trajectories
    num_tokens: list[int]
    """Tokens of each answer that the policy wrote."""
    lengths: list[int]
    """Tokens of each answer with its prompt."""
    scores: list[Score]
    advantages: list[Tensor]
    """Of every token of each answer [num_tokens]."""
    updates: list[list[int]]
    """Indices of the trajectories of each update, all epochs after another."""
    first_epoch: int
    """Updates of the first epoch, in which each trajectory is learned from for the first time."""
    has_signal: list[bool]
    """Whether a trajectory changes the policy. Where a whole group got the same reward, none of it does, and those are
    the longest as a rule."""

    def counted(self, update: int) -> list[int]:
        """Trajectories that the metrics of an update are about: those with a signal, or all if none has one."""
        indices = self.updates[update]
        return [i for i in indices if self.has_signal[i]] or indices

    def work(self, hidden_wanted: bool) -> list[int]:
        """What each trajectory costs, in tokens that go forward. One without a signal goes forward only if its hidden
        states are wanted, or if no trajectory has a signal."""
        forward_only = int(hidden_wanted or not any(self.has_signal))
        costs = (1 + BACKWARD_COST if signal else forward_only for signal in self.has_signal)
        return [length * cost for length, cost in zip(self.lengths, costs, strict=True)]


def make_update_batch(trajectories: Trajectories, step: int, scores: list[Score], config: Config) -> UpdateBatch:
    """Trajectories come group by group, `rollout.samples` each."""
    c = config.learn
    num_tokens = [t.num_tokens for t in trajectories]
    turns = [t.turns for t in trajectories] if config.environment.credit == "turn" else None
    rewards = shaped_rewards(trajectories, config)
    advantages = token_advantages(rewards, num_tokens, scores, config, turns)
    epochs = [_minibatches(len(trajectories), step, epoch, config) for epoch in range(c.epochs)]
    return UpdateBatch(
        trajectories=trajectories,
        num_tokens=num_tokens,
        lengths=[t.length for t in trajectories],
        scores=scores,
        advantages=advantages,
        updates=[indices for epoch in epochs for indices in epoch],
        first_epoch=len(epochs[0]),
        has_signal=[has_kl_loss(c) or bool(a.any()) for a in advantages],
    )


def has_kl_loss(c: LearnConfig) -> bool:
    """Whether the loss has a KL term, which pulls every answer towards the reference, whatever its advantage."""
    return c.kl_coef > 0 and not ALGORITHMS[c.algorithm].kl_in_reward


def shaped_rewards(trajectories: Trajectories, config: Config) -> Tensor:
    """Rewards [answers], less the penalty for answers that come close to `max_tokens`."""
    c = config.learn
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    if c.overlong_buffer:
        lengths = torch.tensor([t.completion_length for t in trajectories])
        rewards = rewards + overlong_penalty(lengths, config.rollout.max_tokens, c.overlong_buffer, c.overlong_penalty)
    return rewards


def token_advantages(
    rewards: Tensor, num_tokens: list[int], scores: list[Score], config: Config, turns: list[Turns] | None = None
) -> list[Tensor]:
    """Advantage of every token, a tensor per answer; with `turns`, each turn has its own."""
    c = config.learn
    algorithm = ALGORITHMS[c.algorithm]
    kl = None
    if algorithm.kl_in_reward:
        pairs = [(s.old, s.reference) for s in scores if s.old is not None and s.reference is not None]
        kl = torch.cat([(old - reference).double().cpu() for old, reference in pairs]) if pairs else None
    groups = rewards.view(-1, config.rollout.samples)
    if turns is not None:
        return by_turn(groups, turns, algorithm.advantage)
    flat = algorithm.advantage(groups, torch.tensor(num_tokens), kl, c.kl_coef)
    return list(flat.split(num_tokens))


def _minibatches(count: int, step: int, epoch: int, config: Config) -> list[list[int]]:
    """Indices of the trajectories of each update of an epoch."""
    if config.learn.minibatches == 1:
        return [list(range(count))]
    generator = torch.Generator().manual_seed(mix_seed(config.seed, "minibatches", step, epoch) % 2**63)
    order = torch.randperm(count, generator=generator)
    return [sorted(part.tolist()) for part in order.tensor_split(config.learn.minibatches) if len(part)]
