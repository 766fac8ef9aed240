"""How far slow texts fall behind when next tokens are guessed, and what that leaves of a lead."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from paceline.draft.pace import ENOUGH, Pace, evenness, relative, together


def texts(rates: list[float], checks: int, depth: int = 3, seed: int = 0) -> list[Pace]:
    dice, paces = random.Random(seed), [Pace() for _ in rates]
    for _ in range(checks):
        for pace, rate in zip(paces, rates, strict=True):
            held = 0
            while held < depth and dice.random() < rate:
                held += 1
            pace.add(1 + held)
    return paces


def relative_of(rates: list[float], checks: int) -> list[float]:
    found = relative(texts(rates, checks))
    assert found is not None
    return found


def test_nothing_is_said_of_texts_that_were_hardly_checked():
    assert relative([]) is None and relative([Pace()] * 4) is None
    assert relative(texts([0.8] * 64, int(ENOUGH) - 1)) is None and relative(texts([0.8] * 64, 12)) is not None


def test_texts_that_have_just_come_are_left_out():
    some = texts([0.8] * 60, 40)
    assert relative([*some, *(Pace() for _ in range(4))]) == relative(some)


@pytest.mark.parametrize("checks", [6, 12, 30, 100])
def test_differences_by_chance_are_not_taken_for_real_ones(checks):
    each = relative_of([0.8] * 128, checks)
    assert fmean(each) == pytest.approx(1) and each[0] > 0.85, "the slowest of 128 seemed to be much slower"
    assert relative_of([1.0] * 128, checks) == [1.0] * 128


@pytest.mark.parametrize("checks", [6, 12, 30])
def test_texts_that_are_hard_to_guess_are_seen_wherever_they_are(checks):
    rates = [0.97] * 118 + [0.02] * 10
    mean = (118 * 3.8 + 10 * 1.02) / 128
    each = relative_of(rates, checks)
    assert each == sorted(each) and each[0] == pytest.approx(1 / mean, abs=0.08)
    random.Random(1).shuffle(rates)
    assert relative_of(rates, checks)[0] == pytest.approx(each[0], abs=0.08)


def test_a_text_that_becomes_easy_catches_up():
    paces = texts([0.97] * 64 + [0.02] * 64, 40)
    before = relative(paces)
    for pace in paces:
        for _ in range(100):
            pace.add(4)
    after = relative(paces)
    assert before is not None and after is not None and before[0] < 0.5 and after[0] > 0.9


def seconds_of(paces: list[float], left: float, share: dict[int, float]) -> float:
    """Until the last of these texts ends, of which each has `left` after it was moved on by its pace; in plain rounds
    of all."""
    rest = sorted(left - pace for pace in paces)
    total, before = 0.0, 0.0
    for ended, at in enumerate(rest):
        running = len(rest) - ended
        total += (at - before) * next((share[n] for n in sorted(share) if n >= running), 1.0)
        before = at
    return total


@pytest.mark.parametrize("share", [{}, {1: 0.7}, {1: 0.1, 2: 0.15, 4: 0.3, 8: 0.5}, {2: 0.9, 6: 0.95}])
def test_a_round_is_worth_the_time_by_which_the_last_text_ends_sooner(share):
    dice = random.Random(3)
    for _ in range(20):
        paces = sorted(dice.uniform(0.2, 1.8) for _ in range(12))
        saved = seconds_of([0.0] * 12, 50, share) - seconds_of(paces, 50, share)
        assert evenness(paces, share) == pytest.approx(saved)


def test_where_few_texts_take_as_long_as_many_only_the_slowest_counts():
    assert evenness([0.3, 1.0, 1.7], {}) == pytest.approx(0.3)
    assert evenness([1.0] * 5, {1: 0.5}) == pytest.approx(1.0)
    assert 0.3 < evenness([0.3, 1.0, 1.7], {1: 0.5}) < evenness([0.3, 1.0, 1.7], {1: 0.4, 2: 0.7}) < 1


def test_texts_of_one_length_end_together_and_a_long_tail_does_not():
    assert together([384] * 128) == 1
    assert together([80] * 120 + [4000] * 8) < 0.05
    assert together([10] * 40 + [256] * 60) == 1, "most of them were cut off"
