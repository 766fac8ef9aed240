"""How the EAGLE drafter makes its draft tokens: a chain, token by token, or a tree, level by level.

It samples as the policy does, with the same Gumbel noise for the same position: where the two distributions are close,
the samples are mostly the same. See docs/sampling.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.draft.base import DeviceDraft
from paceline.draft.eagle.cache import RoundAttention
from paceline.draft.eagle.paged_cache import PagedRound
from paceline.kernels.gumbel_argmax import gumbel_argmax
from paceline.kernels.noise import noise_dtype
from paceline.kernels.positions import up_to

if TYPE_CHECKING:
    from paceline.draft.eagle.model import EagleModel
    from paceline.draft.strategy import Strategy
    from paceline.rollout.rows import RowsView

Attention = RoundAttention | PagedRound


class Sampler:
    """Scores of the next token: the drafter's logits over the temperature, and the noise of the position if the
    strategy uses it."""

    def __init__(self, model: EagleModel, rows: RowsView, noisy: bool, noise: Tensor | None):
        """`noise` [B, at least depth, V] is that of the positions to be drafted; without it, only `sample` works, with
        a kernel that makes its own."""
        self.model = model
        self.rows = rows
        self.noisy = noisy
        self.in_kernel = noise is None
        self.noise: Tensor | None = None
        if noise is None:
            return
        greedy = rows.sampling.temperature == 0
        self.temperature = torch.where(greedy, 1.0, rows.sampling.temperature).to(noise_dtype(model.fc.dtype))[:, None]
        if noisy:
            known = noise if model.vocab is None else noise[..., model.vocab]
            self.noise = known * (~greedy).to(known.dtype)[:, None, None]

    def sample(
        self, hidden: Tensor, normed: Tensor | None, level: int, confidence: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The draft tokens [B] that follow [B, hidden], and with `confidence` their log-probabilities [B]."""
        if not self.in_kernel:
            scores = self.scores(hidden, level)
            index = scores.argmax(-1)
            if not confidence:
                return self.tokens(index), None
            logits = scores if self.noise is None else scores - self.noise[:, level]
            return self.tokens(index), logits.log_softmax(-1).gather(-1, index[:, None])[:, 0]
        logits = self.model.logits(hidden, normed)
        rows = self.rows
        vocab = self.model.vocab
        keys = rows.sampling.keys
        temperature = rows.sampling.temperature
        return gumbel_argmax(
            logits, keys, rows.context, temperature, None, vocab, self.noisy, confidence, ahead=1 + level
        )

    def scores(self, hidden: Tensor, level: int) -> Tensor:
        """What follows [B * n, hidden], where n belong to each request -> [B * n, tokens that can be drafted]"""
        logits = self.model.logits(hidden)  # divided by a wider type, they become that type
        batch = len(self.temperature)
        if len(logits) == batch:
            logits = logits / self.temperature
            return logits if self.noise is None else logits + self.noise[:, level]
        logits = logits.view(batch, -1, logits.shape[-1]) / self.temperature[:, None]
        return (logits if self.noise is None else logits + self.noise[:, level, None]).flatten(0, 1)

    def tokens(self, index: Tensor) -> Tensor:
        """Tokens of the policy's vocabulary from numbers in the drafter's."""
        return index if self.model.vocab is None else self.model.vocab[index]


def propose_chain(
    model: EagleModel, rows: RowsView, hidden: Tensor, strategy: Strategy, sampler: Sampler, attention: Attention
) -> DeviceDraft:
    batch = len(rows.context)
    device = rows.context.device
    depth = strategy.depth
    positions = rows.context[:, None] + up_to(depth + 1, device)[1:]
    cos, sin = (x.view(batch, depth, 1, -1) for x in model.rotations(positions.flatten(), hidden.dtype))
    tokens: list[Tensor] = []
    log_probs: list[Tensor] = []
    normed: Tensor | None = None
    for level in range(depth):
        if level:
            attention.draft_token()
            turned = cos[:, level - 1], sin[:, level - 1]
            hidden, normed = model.step(tokens[-1], hidden, turned, attention)
        token, log_prob = sampler.sample(hidden, normed, level, bool(strategy.shared))
        tokens.append(token)
        if strategy.shared and log_prob is not None:
            log_probs.append(log_prob)
    parents = up_to(depth, device).expand(batch, -1)
    return DeviceDraft(torch.stack(tokens, 1), parents, torch.stack(log_probs, 1) if log_probs else None)


def propose_tree(
    model: EagleModel, rows: RowsView, hidden: Tensor, strategy: Strategy, sampler: Sampler, attention: Attention
) -> DeviceDraft:
    """At every level the `width` likeliest continuations of the level above; of all, the likeliest `nodes`."""
    batch = len(rows.context)
    device = rows.context.device
    width = strategy.width
    best = sampler.scores(hidden, 0).log_softmax(-1).topk(width)
    score = best.values
    token = sampler.tokens(best.indices)  # [B, width] of the newest level
    parent = torch.zeros_like(token)
    ancestry = torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)  # itself included
    hidden = hidden[:, None].expand(-1, width, -1)
    levels = [(token, parent, score)]
    base = rows.context + 1
    for level in range(1, strategy.depth):
        first = (level - 1) * width
        attention.draft_level(ancestry)
        position = (base + (level - 1))[:, None].expand(-1, width)
        hidden = model(token.flatten(), hidden.flatten(0, 1), position.flatten(), attention)
        hidden = hidden.view(batch, width, -1)
        scores = sampler.scores(hidden.flatten(0, 1), level).log_softmax(-1).view(batch, width, -1)
        after = (score[..., None] + scores).topk(width)  # of each
        best = after.values.flatten(1).topk(width)
        beam = best.indices // width
        score = best.values
        token = sampler.tokens(after.indices.flatten(1).gather(1, best.indices))
        parent = 1 + first + beam
        above = ancestry.gather(1, beam[..., None].expand_as(ancestry))
        ancestry = torch.cat((above, torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)), 2)
        hidden = hidden.gather(1, beam[..., None].expand_as(hidden))
        levels.append((token, parent, score))
    tokens, parents, scores = (torch.cat(part, 1) for part in zip(*levels, strict=True))
    if strategy.nodes < tokens.shape[1]:
        tokens, parents = _likeliest(tokens, parents, scores, strategy.nodes)
    return DeviceDraft(tokens, parents)


def _likeliest(tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """The `nodes` likeliest of a tree, in their order. A child is never likelier than its parent, and of equals the
    first is taken, so what is left is a tree."""
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(1).values
    present = torch.zeros_like(tokens).scatter(1, kept, 1)
    number = present.cumsum(1)  # new number of each node that stays, counted from 1; 0 is the root
    number = torch.cat((torch.zeros_like(number[:, :1]), number), 1)
    return tokens.gather(1, kept), number.gather(1, parents.gather(1, kept))
