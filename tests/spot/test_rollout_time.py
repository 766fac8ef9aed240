from __future__ import annotations

import pytest

from paceline.draft.strategy import Strategy
from paceline.rollout.stats import RoundRecord
from paceline.spot.rollout_time import RolloutTime, chain_length, rate_of

STRATEGIES = [Strategy.parse(text) for text in ("plain", "neural:2", "neural:5", "neural:4x3/8", "suffix:8")]


def rounds(strategy: str, batch: int, seconds: float, each: float, count: int = 20) -> list[RoundRecord]:
    return [RoundRecord(0.0, seconds, batch, strategy, round(batch * each)) for _ in range(count)]


@pytest.mark.parametrize("accept_length", [1.0, 1.5, 3.0, 5.9])
def test_a_rate_gives_back_its_accept_length(accept_length):
    assert chain_length(rate_of(accept_length, 5), 5) == pytest.approx(accept_length, abs=1e-6)


def test_plainly_it_takes_what_it_took():
    time = RolloutTime(STRATEGIES, 64, 5)
    time.observe([rounds("plain", 64, 0.05, 1, 100) + rounds("plain", 1, 0.01, 1, 300)], 1)
    assert time.seconds(1.0) == pytest.approx(100 * 0.05 + 300 * 0.01)


def test_a_better_drafter_saves_where_its_rounds_are_cheap():
    """Rounds with chains of five take twice as long as plain ones for one sequence, and ten times for 64."""
    time = RolloutTime(STRATEGIES, 64, 5)
    time.observe([
        rounds("plain", 64, 0.05, 1, 100) + rounds("plain", 1, 0.01, 1, 300)
        + rounds("neural:5", 64, 0.5, 1) + rounds("neural:5", 1, 0.02, 1)
        + rounds("neural:2", 64, 0.5, 1) + rounds("neural:2", 1, 0.02, 1)
    ], 1)  # fmt: skip
    tokens = {64: 140, 1: 340}
    plain = tokens[64] * 0.05 + tokens[1] * 0.01
    assert time.seconds(1.0) == pytest.approx(plain)
    assert time.seconds(4.0) == pytest.approx(tokens[64] * 0.05 + tokens[1] * 0.02 / 4.0)
    lengths = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0]
    seconds = [time.seconds(length) for length in lengths]
    assert seconds == sorted(seconds, reverse=True)


def test_what_drafts_without_training_save_is_not_the_drafters():
    suffix = rounds("suffix:8", 1, 0.02, 4, 50)
    time = RolloutTime(STRATEGIES, 64, 5)
    time.observe([rounds("plain", 1, 0.01, 1, 100) + rounds("neural:5", 1, 0.02, 1, 10) + suffix], 1)
    assert time.seconds(1.0) == pytest.approx((100 + 10 + 200) * 0.02 / 4)


def test_workers_decode_at_the_same_time():
    one = RolloutTime(STRATEGIES, 64, 5)
    two = RolloutTime(STRATEGIES, 64, 5)
    one.observe([rounds("plain", 8, 0.02, 1, 50)], 1)
    two.observe([rounds("plain", 8, 0.02, 1, 50), rounds("plain", 8, 0.02, 1, 50), []], 2)
    assert one.seconds(1.0) == two.seconds(1.0)


def test_prefills_and_strange_strategies_are_left_out():
    time = RolloutTime(STRATEGIES, 64, 5)
    time.observe([rounds("prefill", 8, 9.0, 1) + rounds("plain", 8, 0.02, 1, 50)], 1)
    assert time.seconds(1.0) == pytest.approx(50 * 0.02)
