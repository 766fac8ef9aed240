"""How a block drafter makes its draft tokens: all of them from one pass over learned masks.

Behind the entries of known tokens come masks, one for each draft token but the first, whose inputs are always the same:
the embedding of a token that is never written, and learned features. They see the known entries and one another. What
each draft token would be on its own is known after one pass; with `DrafterShape.sequential` a small network in front of
the head tells each the one before it, which was sampled with the noise of its position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.draft.base import DeviceDraft
from paceline.kernels.positions import up_to

if TYPE_CHECKING:
    from paceline.draft.eagle.model import EagleModel
    from paceline.draft.eagle.propose import Attention, Sampler
    from paceline.draft.strategy import Strategy
    from paceline.rollout.rows import RowsView


def propose_block(
    model: EagleModel, rows: RowsView, hidden: Tensor, strategy: Strategy, sampler: Sampler, attention: Attention
) -> DeviceDraft:
    """A chain of `depth` draft tokens; of a tree, the other nodes stay empty."""
    batch = len(rows.context)
    device = rows.context.device
    depth = strategy.depth
    outputs = [hidden]
    if depth > 1:
        masks = depth - 1
        attention.draft_level(torch.ones(masks, masks, dtype=torch.bool, device=device).tril().expand(batch, -1, -1))
        positions = rows.context[:, None] + 1 + up_to(masks, device)
        tokens, inputs = model.masks(batch * masks)
        out = model(tokens, inputs, positions.flatten(), attention)
        outputs += out.view(batch, masks, -1).unbind(1)
    token = rows.tokens.long()
    chosen: list[Tensor] = []
    log_probs: list[Tensor] = []
    for level, output in enumerate(outputs):
        token, log_prob = sampler.sample(model.condition(output, token), None, level, bool(strategy.shared))
        chosen.append(token)
        if strategy.shared and log_prob is not None:
            log_probs.append(log_prob)
    empty = strategy.nodes - depth
    tokens = torch.stack(chosen, 1)
    parents = up_to(depth, device).expand(batch, -1)
    if empty:
        tokens = torch.cat((tokens, tokens.new_full((batch, empty), -1)), 1)
        parents = torch.cat((parents, parents.new_zeros(batch, empty)), 1)
    return DeviceDraft(tokens, parents, torch.stack(log_probs, 1) if log_probs else None)
