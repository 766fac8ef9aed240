"""What the sampling of a batch has to do beside the temperature."""

from __future__ import annotations

from enum import IntEnum

from paceline.core import SamplingParams


class Filters(IntEnum):
    """What changes the distribution besides the temperature. A batch is sampled with the highest of its requests."""

    NONE = 0
    BANS = 1  # min_tokens: stop tokens have no probability yet
    SORTS = 2  # also top-k, top-p and min-p, for which the vocabulary is sorted


def filters_of(sampling: SamplingParams) -> Filters:
    if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
        return Filters.SORTS
    return Filters.BANS if sampling.min_tokens > 0 else Filters.NONE
