"""How far slow texts fall behind when next tokens are guessed, and what that leaves of a lead."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from paceline.draft.pace import ENOUGH, Pace, evenness, rates, together


def texts(chances: list[float], checks: int, depth: int = 3, seed: int = 0) -> list[Pace]:
    dice, paces = random.Random(seed), [Pace() for _ in chances]
    for _ in range(checks):
        for pace, chance in zip(paces, chances, strict=True):
            held = 0
            while held < depth and dice.random() < chance:
                held += 1
            pace.add(held, depth)
    return paces


def rates_of(chances: list[float], checks: int, depth: int = 3) -> list[float]:
    found = rates(texts(chances, checks, depth))
    assert found is not None and found == sorted(found)
    return found


def test_nothing_is_said_of_texts_that_were_hardly_checked():
    assert rates([]) is None and rates([Pace()] * 4) is None
    assert rates(texts([0.8] * 64, int(ENOUGH) - 1)) is None and rates(texts([0.8] * 64, 12)) is not None


def test_texts_that_have_just_come_are_left_out():
    some = texts([0.8] * 60, 40)
    assert rates([*some, *(Pace() for _ in range(4))]) == rates(some)


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_rates_are_those_of_single_guesses_however_deep_checks_are(depth):
    assert fmean(rates_of([0.8] * 256, 60, depth)) == pytest.approx(0.8, abs=0.03)
    assert rates_of([1.0] * 5, 12, depth) == [1.0] * 5 and rates_of([0.0] * 5, 12, depth) == [0.0] * 5


def test_texts_that_are_alike_get_apart_by_chance_and_less_in_more_checks():
    slowest = [rates_of([0.8] * 128, checks)[0] for checks in (10, 20, 40)]
    assert 0.3 < slowest[0] < slowest[1] < slowest[2] < 0.75


@pytest.mark.parametrize("checks", [10, 30])
def test_texts_that_are_hard_to_guess_are_seen_wherever_they_are(checks):
    chances = [0.97] * 118 + [0.02] * 10
    for _ in range(2):
        each = rates_of(chances, checks)
        assert each[9] < 0.2 and each[10] > 0.75
        random.Random(1).shuffle(chances)


def test_a_text_that_becomes_easy_catches_up():
    paces = texts([0.97] * 64 + [0.02] * 64, 40)
    before = rates(paces)
    for pace in paces:
        for _ in range(100):
            pace.add(3, 3)
    after = rates(paces)
    assert before is not None and after is not None and before[0] < 0.1 and after[0] > 0.95


def tokens(rate: float, depth: int) -> float:
    return sum(rate**level for level in range(depth + 1))


def seconds_of(left: list[float], share: dict[int, float]) -> float:
    """Until the last of texts that have so much left ends, in plain rounds of all."""
    total, before = 0.0, 0.0
    for ended, at in enumerate(sorted(left)):
        running = len(left) - ended
        total += (at - before) * next((share[n] for n in sorted(share) if n >= running), 1.0)
        before = at
    return total


@pytest.mark.parametrize("share", [{}, {1: 0.7}, {1: 0.1, 2: 0.15, 4: 0.3, 8: 0.5}, {2: 0.9, 6: 0.95}])
@pytest.mark.parametrize("depth", [1, 2, 7])
def test_a_round_is_worth_the_time_by_which_the_last_text_ends_sooner(share, depth):
    dice = random.Random(3)
    for _ in range(20):
        each = sorted(dice.uniform(0.0, 1.0) for _ in range(12))
        moved = [tokens(rate, depth) for rate in each]
        saved = seconds_of([50.0] * 12, share) - seconds_of([50 - n for n in moved], share)
        assert evenness(each, depth, share) * fmean(moved) == pytest.approx(saved)


def test_deep_guesses_leave_slow_texts_further_behind():
    each, share = [0.1] * 4 + [0.9] * 28, {1: 0.6, 4: 0.7, 16: 0.9}
    assert evenness(each, 1, share) > evenness(each, 3, share) > evenness(each, 7, share)
    assert evenness([0.8] * 32, 7, share) == pytest.approx(1.0)


def test_where_few_texts_take_as_long_as_many_only_the_slowest_counts():
    each = [0.0, 0.5, 1.0]  # that is 1, 1.5 and 2 tokens
    assert evenness(each, 1, {}) == pytest.approx(1 / 1.5)
    assert 1 / 1.5 < evenness(each, 1, {1: 0.5}) < evenness(each, 1, {1: 0.4, 2: 0.7}) < 1


def test_texts_of_one_length_end_together_and_a_long_tail_does_not():
    assert together([384] * 128) == 1
    assert together([80] * 120 + [4000] * 8) < 0.05
    assert together([10] * 40 + [256] * 60) == 1, "most of them were cut off"
