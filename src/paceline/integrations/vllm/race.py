"""The race as verification in vLLM: every row of a pass is drawn with the noise of its request's seed and its position,
and draft tokens are accepted while they are what was drawn. So what is written does not depend on what was drafted.

Here are the functions that take the place of vLLM's own while a pass is sampled (`same_tokens`). The second model
runner draws with noise of this kind by itself, and so with its own; the first one has a generator per request instead,
and draws with `kernels.noise`: a request with seed s gets what Paceline's engine gives request 0 with seed s.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels.gumbel_argmax import gumbel_argmax
from paceline.kernels.noise import request_key

RACING: ContextVar[RacedPass | None] = ContextVar("RACING", default=None)
"""The pass that is being sampled by race; None in engines that sample as vLLM does."""
NO_TOKEN = -1
"""In what the first model runner is told: nothing was written here."""


class DrawnRows(NamedTuple):
    """What the noise of some rows of logits is made from."""

    keys: Tensor  # int64 [rows]
    positions: Tensor  # int [rows], of the tokens that are drawn

    def draw(self, logits: Tensor, greedy: Tensor | None = None) -> Tensor:
        """logits [rows, V], with temperature and filters applied; bool [rows] -> tokens int64 [rows]."""
        if not len(logits):  # a pass in which nothing was drafted after all
            return logits.new_empty(0, dtype=torch.int64)
        temperature = torch.ones(len(logits), device=logits.device)
        if greedy is not None:
            temperature = temperature.masked_fill(greedy, 0.0)
        return gumbel_argmax(logits, self.keys, self.positions, temperature, logprobs=False)[0]


@dataclass(frozen=True)
class RacedPass:
    """A pass of either model runner; the second one has all that it needs in its own arguments."""

    last: DrawnRows | None = None
    """Of the last row of each request: the only one where nothing was drafted."""
    drafted: DrawnRows | None = None
    """Of the rows before those, which verify draft tokens."""
    layout: Any = None
    """vLLM's SpecDecodeMetadata, where draft tokens are verified."""


@lru_cache(maxsize=1 << 16)
def key_of_seed(seed: int) -> int:
    return request_key(seed, 0)


def accept(draws: Tensor, drafts: Tensor, first_rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """What was drawn from each row and the token that each row had read [rows], by which the first row of a request has
    read its last token, and the others their draft tokens; the first rows of the requests and the end [B + 1] -> draws
    [B, width] by request, and how many of them count int32 [B]: up to the first one that was not drafted."""
    rows = first_rows[:-1, None] + torch.arange(width, device=draws.device)
    exists = rows < first_rows[1:, None]
    rows = rows.clamp(max=len(draws) - 1)
    drawn = draws[rows]
    right = (drawn[:, :-1] == drafts[rows[:, 1:]]) & exists[:, 1:]
    return drawn, (1 + right.cumprod(1).sum(1)).to(torch.int32)


def verify_second(
    gumbel_sample: Any,
    target_logits: Tensor,
    drafts: Tensor,
    first_rows: Tensor,
    positions: Tensor,
    states: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    depth: int,
    use_fp64: bool,
) -> tuple[Tensor, Tensor]:
    """Of the second model runner, with the sampler of its passes without draft tokens. Logits [rows, V] are processed;
    `states` are the places of the rows' requests in `temperature` and `seeds`."""
    draws = gumbel_sample(
        target_logits, states, temperature, seeds, positions, apply_temperature=False, use_fp64=use_fp64
    )
    return accept(draws, drafts, first_rows, depth + 1)


def verify_first(raced: RacedPass, target_logits: Tensor, bonus: Tensor, sampling: Any, drafts: Tensor) -> Tensor:
    """Of the first model runner: processed logits [draft tokens, V], the tokens drawn from the requests' last rows
    [B, 1] and vLLM's sampling metadata -> tokens int32 [B, deepest + 1], NO_TOKEN behind those that count."""
    assert raced.drafted is not None and raced.layout is not None
    layout = raced.layout
    counts = torch.tensor(layout.num_draft_tokens, device=drafts.device)
    greedy = None
    if not sampling.all_random:
        greedy = torch.ones_like(counts, dtype=torch.bool) if sampling.all_greedy else sampling.temperature == 0
        greedy = greedy.repeat_interleave(counts)
    draws = drafts.new_empty(len(layout.logits_indices), dtype=torch.int64)
    draws[layout.target_logits_indices] = raced.drafted.draw(target_logits, greedy)
    draws[layout.bonus_logits_indices] = bonus[:, 0].long()
    read = torch.full_like(draws, NO_TOKEN)
    read[layout.target_logits_indices + 1] = drafts.long()
    ends = layout.cu_num_sampled_tokens
    width = layout.max_spec_len + 1
    tokens, written = accept(draws, read, torch.cat([ends.new_zeros(1), ends]), width)
    beyond = torch.arange(width, device=tokens.device) >= written[:, None]
    return tokens.masked_fill(beyond, NO_TOKEN).to(torch.int32)


def by_row(values: Tensor, ends: Tensor, replace_from: float, replace_to: float) -> Tensor:
    """Values [B] for each of the requests' rows, which end at `ends` [B]. On a CPU vLLM 0.32 leaves them unset."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return torch.where(values == replace_from, replace_to, values).to(values.dtype).repeat_interleave(counts)
