"""Verifying draft tokens that requests share by confidence: each has its own number of them, and a pass their total.

Matmuls, most of a pass, run over the rows that were chosen; attention spreads their queries over [B, T], where
those that were not chosen are computed and dropped. Shapes depend on the batch and the budget alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from paceline.kernels.accept import count_accepted
from paceline.kernels.positions import tree_nodes, up_to
from paceline.rollout.filters import Filters
from paceline.rollout.sampling import SamplingRows, draw

if TYPE_CHECKING:
    from paceline.draft.confidence import SharedRows
    from paceline.model.decoder import Decoder
    from paceline.rollout.attention import SharedAttention
    from paceline.rollout.rows import RowsView


class SharedOutput(NamedTuple):
    """What a pass over shared rows has sampled, spread over [B, T]; zeros where nothing was verified."""

    sampled: Tensor  # int64 [B, T]
    logprobs: Tensor  # [B, T]
    num_accepted: Tensor  # int64 [B]
    features: Tensor | None  # [B, T, width]


def verify_shared(
    model: Decoder,
    rows: RowsView,
    drafted: Tensor,
    attention: SharedAttention,
    filters: Filters,
    taps: bool,
    noise: Callable[[], Tensor],
) -> SharedOutput:
    """Verify those of the draft tokens [B, depth] that the attention was made for. `noise` computes the Gumbel noise
    [B, depth + 1, V] of the next positions."""
    shared = attention.shared
    depth = up_to(drafted.shape[1] + 1, drafted.device).expand(len(drafted), -1)
    tokens, positions = (x[shared.flat] for x in tree_nodes(rows.tokens, rows.context, drafted, depth))
    hidden, features = model(tokens, positions, attention, taps=taps)
    sampling = SamplingRows(*(x[shared.request] for x in vars(rows.sampling).values()))
    sampling = replace(sampling, min_left=sampling.min_left - shared.level.to(sampling.min_left.dtype))
    chosen_noise = lambda: noise()[shared.request, shared.level]  # noqa: E731
    sampled, logprobs = draw(model.logits(hidden), sampling, positions, filters, chosen_noise, ahead=1)
    whole = spread(sampled, shared)
    num_accepted = count_accepted(drafted, whole, attention.usable & shared.chosen)
    return SharedOutput(
        whole, spread(logprobs, shared), num_accepted, None if features is None else spread(features, shared)
    )


def spread(values: Tensor, shared: SharedRows) -> Tensor:
    """[B + N, ...] of the chosen rows -> [B, T, ...], zeros elsewhere."""
    batch, width = shared.chosen.shape
    out = values.new_zeros(batch * width, *values.shape[1:])
    return out.index_copy_(0, shared.flat, values).view(batch, width, *values.shape[1:])
