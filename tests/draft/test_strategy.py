from __future__ import annotations

import pytest

from paceline.draft.registry import default_strategies
from paceline.draft.strategy import PLAIN, Strategy
from paceline.errors import UserError


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "suffix:8",
        "neural:5",
        "neural:4x3",
        "neural:4x3/8",
        "neural:4x3/8~",
        "mine:1",
        "neural:10@4",
        "neural:6@2~",
    ],
)
def test_strategies_are_what_is_written(text):
    assert str(Strategy.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "neural", "neural:0", "a:3x0", "a:4x3/13", "a:4x3/2", "neural:64", "5", "a:4@4", "a:4@0", "a:4x3@2"]
)
def test_what_is_no_strategy_is_refused_by_name(text):
    with pytest.raises(UserError, match=f"'{text}'"):
        Strategy.parse(text)


def test_plain_decoding_is_always_among_them():
    assert default_strategies([]) == [PLAIN]
    assert {s.drafter for s in default_strategies(["suffix", "neural"])} == {"plain", "suffix", "neural"}


def test_shared_draft_tokens_are_for_several_requests_and_cost_what_is_verified():
    shared = Strategy.parse("neural:10@4")
    assert shared.num_verified == 11, "one request may get all of its draft tokens, and needs pages for them"
    assert shared.pass_rows(8) == 40 and Strategy.parse("neural:10").pass_rows(8) == 88
    assert not shared.fits(1) and shared.fits(2)
    assert shared.family != Strategy.parse("neural:10@5").family
