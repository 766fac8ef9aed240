"""How far slow texts fall behind when next tokens are guessed."""

from __future__ import annotations

import random

import pytest

from paceline.draft.pace import ENOUGH, Pace, evenness


def texts(rates: list[float], checks: int, depth: int = 3, seed: int = 0) -> list[Pace]:
    dice, paces = random.Random(seed), [Pace() for _ in rates]
    for _ in range(checks):
        for pace, rate in zip(paces, rates, strict=True):
            held = 0
            while held < depth and dice.random() < rate:
                held += 1
            pace.add(1 + held)
    return paces


def test_nothing_is_said_of_texts_that_were_hardly_checked():
    assert evenness([]) is None and evenness([Pace()] * 4) is None
    assert evenness(texts([0.8] * 64, int(ENOUGH) - 1)) is None and evenness(texts([0.8] * 64, 12)) is not None


@pytest.mark.parametrize("checks", [12, 30, 100])
def test_texts_that_are_alike_are_nearly_even(checks):
    even = evenness(texts([0.8] * 128, checks))
    assert even is not None and 0.8 < even <= 1.0, "chance makes the slowest tenth a little slower"
    assert evenness(texts([1.0] * 128, checks)) == pytest.approx(1.0)


@pytest.mark.parametrize("checks", [12, 30])
def test_a_fifth_that_is_hard_to_guess_is_seen_wherever_it_is(checks):
    rates = [0.97] * 102 + [0.02] * 26
    even = evenness(texts(rates, checks))
    random.Random(1).shuffle(rates)
    shuffled = evenness(texts(rates, checks))
    # 1.02 of 3.25 tokens; some of it is taken for chance as long as there were few checks
    assert even is not None and shuffled is not None and 0.3 < even < 0.55 and shuffled == pytest.approx(even, abs=0.05)


def test_a_text_that_becomes_easy_catches_up():
    paces = texts([0.97] * 64 + [0.02] * 64, 40)
    before = evenness(paces)
    for pace in paces:
        for _ in range(60):
            pace.add(4)
    after = evenness(paces)
    assert before is not None and after is not None and before < 0.6 and after > 0.85
