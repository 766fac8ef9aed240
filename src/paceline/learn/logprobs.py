"""Log-probabilities of given tokens, without ever holding the logits of a whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline.learn.packing import MicroBatch
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder
from paceline.model.foreign import ForeignModel

Policy = Decoder | ForeignModel
"""What can be learned."""
OnHidden = Callable[[int, Tensor, Tensor, Tensor], None]
"""Is called with a trajectory's index, its tokens [n], tapped features [n, taps * hidden] and last hidden states
[n, hidden]."""
LOGITS_AT_ONCE = 2**26  # logits; more are made in pieces, and again in the backward pass: 256 MB each in float32


def hidden_states(
    model: Policy, batch: MicroBatch, recompute_layers: bool = False, on_hidden: OnHidden | None = None
) -> Tensor:
    """Last hidden states of a micro-batch [N, hidden]; `on_hidden` is called with each trajectory's part of them,
    where the model is one that a drafter learns from."""
    if isinstance(model, ForeignModel):
        return model.hidden(batch.tokens, batch.lengths)
    attention = PackedAttention(batch.lengths, batch.tokens.device)
    run = _recomputed if recompute_layers and torch.is_grad_enabled() else None
    hidden, features = model(batch.tokens, attention.positions(), attention, run=run, taps=on_hidden is not None)
    if on_hidden is not None and features is not None:
        parts = (t.detach().split(batch.lengths) for t in (batch.tokens, features, hidden))
        for index, *part in zip(batch.indices, *parts, strict=True):
            on_hidden(index, *part)
    return hidden


def token_logprobs(
    model: Policy,
    batch: MicroBatch,
    temperature: float,
    recompute_layers: bool = False,
    on_hidden: OnHidden | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability at `temperature` of each answer token [R], and the entropy of its distribution [R], detached."""
    hidden = hidden_states(model, batch, recompute_layers, on_hidden)[batch.predicts]
    piece = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    if len(hidden) <= piece:
        return _logprobs(model, hidden, batch.targets, temperature)
    parts = [
        checkpoint(_logprobs, model, h, t, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(piece), batch.targets.split(piece), strict=True)
    ]
    logp, entropy = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropy)


def _logprobs(model: Policy, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logp = (model.logits(hidden).to(wide) / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None])[:, 0], entropy


def _recomputed(layer: torch.nn.Module, *inputs: object) -> Tensor:
    return checkpoint(layer, *inputs, use_reentrant=False)
