"""Details of the race that the tests of the law cannot see."""

import pytest
import torch

from paceline.core import SamplingParams
from paceline.rollout import sampling
from paceline.rollout.filters import Filters, filters_of
from paceline.rollout.rows import Rows
from paceline.rollout.sampling import SamplingRows, filtered_gumbel_argmax


def test_rows_that_pad_a_graph_are_harmless_with_filters_on():
    """A graph for 4 requests serves 3: its last row is all zeros, also where filters expect a positive number."""
    rows = Rows(4, 1, torch.device("cpu"))
    view = rows.view(0, 4).sampling
    view.temperature[:3], view.top_p[:3], view.min_p[:3] = 1.0, 0.5, 0.1
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    noise = torch.zeros_like(logits)
    tokens, logprobs = filtered_gumbel_argmax(logits, view, noise, Filters.SORTS)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert logprobs.isfinite().all()


def some_rows(count: int, banned: tuple[int, ...]) -> SamplingRows:
    view = Rows(count, 1, torch.device("cpu")).view(0, count).sampling
    view.temperature[:] = torch.linspace(0, 1.5, count)
    view.top_p[:] = 1.0
    view.min_left[: count // 2] = 3
    view.banned[:, : len(banned)] = torch.tensor(banned, dtype=torch.int32)
    return view


@pytest.mark.parametrize("filters", [Filters.BANS, Filters.SORTS])
def test_rows_are_filtered_a_few_at_a_time(monkeypatch, filters):
    rows, g = some_rows(23, (3, 5)), torch.Generator().manual_seed(0)
    rows.top_p[::2], rows.top_k[::3], rows.min_p[::4] = 0.7, 9, 0.05
    logits, noise = torch.randn(23, 40, generator=g) * 3, torch.randn(23, 40, generator=g)
    whole = filtered_gumbel_argmax(logits, rows, noise, filters)
    for at_once in (40 * 7, 1):
        monkeypatch.setattr(sampling, "AT_ONCE", at_once)
        assert all(
            torch.equal(a, b) for a, b in zip(filtered_gumbel_argmax(logits, rows, noise, filters), whole, strict=True)
        )


def test_nothing_is_sorted_to_ban_a_token(monkeypatch):
    rows, g = some_rows(32, (3,)), torch.Generator().manual_seed(0)
    logits, noise = torch.randn(32, 40, generator=g), torch.randn(32, 40, generator=g)
    logits[:, 3] = 20.0
    sorted_too = filtered_gumbel_argmax(logits, rows, noise, Filters.SORTS)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    tokens, logprobs = filtered_gumbel_argmax(logits, rows, noise, Filters.BANS)
    assert torch.equal(tokens, sorted_too[0]) and torch.equal(logprobs, sorted_too[1])
    assert (tokens == 3).tolist() == [False] * 16 + [True] * 16
    assert (logprobs[:16] < -10).all(), "the policy's own, before filters"


def test_what_a_request_asks_for():
    assert filters_of(SamplingParams()) == Filters.NONE and filters_of(SamplingParams(min_tokens=2)) == Filters.BANS
    asked = [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5, "min_tokens": 2}]
    assert {filters_of(SamplingParams(**a)) for a in asked} == {Filters.SORTS}
