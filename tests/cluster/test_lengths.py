"""What is expected of an answer's length, and what remembering it takes."""

from __future__ import annotations

import tracemalloc

import pytest

from paceline.cluster import lengths
from paceline.cluster.lengths import Lengths


def test_the_same_prompt_then_prompts_of_its_length_then_the_default():
    known = Lengths(500.0)
    one, other, longer = (1, 2, 3), (3, 2, 1), tuple(range(40))
    assert known.expect(one) == 500.0
    known.learn(one, [100, 300])
    assert known.expect(one) == known.expect(other) == 200.0
    assert known.expect(longer) == pytest.approx(500 + lengths.WEIGHT * (200 - 500))
    known.learn(other, [80])
    assert known.expect(one) == 200.0 and known.expect(other) == 80.0
    known.learn(one, [100])
    assert known.expect(one) == pytest.approx(200 + lengths.WEIGHT * (100 - 200))
    known.learn(one, [])
    assert known.expect(one) == pytest.approx(200 + lengths.WEIGHT * (100 - 200))


def test_the_prompt_that_was_learned_from_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(lengths, "KEPT", 3)
    known = Lengths(0.0)
    for token in (1, 2, 3):
        known.learn((token,), [10 * token])
    known.learn((1,), [10])
    known.learn((4,), [40])
    assert [known.expect((token,)) for token in (1, 3, 4)] == [10.0, 30.0, 40.0]
    assert known.expect((2,)) == known.expect((5,)), "by the length of the prompt only"


@pytest.mark.parametrize("differs", [0, 1023])
def test_prompts_that_differ_in_one_token_are_two(differs):
    known = Lengths(0.0)
    prompt = list(range(151_000, 152_024))
    known.learn(tuple(prompt), [10])
    prompt[differs] += 2**17
    known.learn(tuple(prompt), [90])
    assert known.expect(tuple(prompt)) == 90.0
    prompt[differs] -= 2**17
    assert known.expect(tuple(prompt)) == 10.0


def test_long_prompts_take_no_more_memory_than_short_ones():
    """All that are remembered, and half as many again; 1,024 tokens each would be half a gigabyte of tuples."""
    known, rest = Lengths(0.0), tuple(range(300, 1323))
    tracemalloc.start()
    try:
        for number in range(lengths.KEPT * 3 // 2):
            known.learn((10**6 + number, *rest), [number])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(known._same) == lengths.KEPT and taken < 16 * 2**20, taken
    assert known.expect((10**6 + number, *rest)) == number
