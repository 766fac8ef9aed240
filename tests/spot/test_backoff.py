"""Training happens as often as it pays."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from paceline.spot.backoff import GAIN_VERSIONS, MAX_EVERY, Backoff
from paceline.spot.evaluation import Evaluation


def judged(backoff: Backoff, *pairs: tuple[float, float]) -> list[int]:
    """Note evaluations -> after each, in one of how many steps training is due."""
    every = []
    for before, after in pairs:
        backoff.note(Evaluation(before, after, 100))
        every.append(backoff.every)
    return every


def test_while_versions_are_worth_it_every_step_is_due():
    backoff = Backoff()
    rising = [2.0 * 1.02**i for i in range(20)]
    assert set(judged(backoff, *pairwise(rising))) == {1}
    assert all(backoff.due(step) for step in range(50))


def test_training_that_only_keeps_up_with_the_policy_is_worth_it():
    """The level stays where it is, but without training it would fall."""
    assert set(judged(Backoff(), *[(4.9, 5.0)] * 20)) == {1}


def test_when_nothing_is_won_it_is_due_less_and_less_often():
    backoff = Backoff()
    got = judged(backoff, *[(5.0, 5.001)] * 20)
    n = GAIN_VERSIONS
    assert got == [*[1] * (n - 1), *[2] * n, *[4] * n, *[8] * (20 - 3 * n + 1)]
    assert backoff.every == MAX_EVERY and sum(backoff.due(step) for step in range(80)) == 10


def test_a_version_that_was_not_published_counts_as_nothing_won_however_bad_it_was():
    assert judged(Backoff(), (5.0, 1.0), (5.0, 5.05), (5.0, 5.05), (5.0, 5.05))[-1] == 1
    assert judged(Backoff(), *[(5.0, 4.9)] * GAIN_VERSIONS)[-1] == 2


def test_when_the_published_drafter_falls_behind_every_step_is_due_again():
    backoff = Backoff()
    judged(backoff, *[(5.0, 5.0)] * 3 * GAIN_VERSIONS)
    assert backoff.every == 8
    assert judged(backoff, (4.9, 4.9)) == [8], "that much, answers differ from step to step"
    assert judged(backoff, (4.5, 4.6)) == [1]
    assert judged(backoff, *[(4.6, 4.6)] * GAIN_VERSIONS)[-1] == 2, "it settles at the new level"


def test_the_rollout_tells_between_verdicts():
    backoff = Backoff()
    for _ in range(3 * GAIN_VERSIONS):
        backoff.note(Evaluation(5.0, 5.0, 100))
        backoff.note_rollout(4.0)
    assert backoff.every == 8
    for length in (4.1, 3.9, 4.05, 3.85, 4.0):
        backoff.note_rollout(length)
    assert backoff.every == 8, "chance"
    backoff.note_rollout(3.6)
    backoff.note_rollout(3.6)
    assert backoff.every == 1
    judged(backoff, *[(5.0, 5.0)] * GAIN_VERSIONS)
    for _ in range(10):
        backoff.note_rollout(3.6)
    assert backoff.every == 2, "the new level is no reason for alarm"


def test_gains_bring_it_back_step_by_step():
    backoff = Backoff()
    judged(backoff, *[(5.0, 5.0)] * 3 * GAIN_VERSIONS)
    got = judged(backoff, *[(5.0, 5.05)] * 12)
    assert got[GAIN_VERSIONS - 1] == 4 and got[-1] == 1 and sorted(got, reverse=True) == got


def test_what_says_nothing_changes_nothing():
    backoff = Backoff()
    for evaluation in (Evaluation(0.0, 0.0, 0), Evaluation(5.0, float("nan"), 10)):
        for _ in range(10):
            backoff.note(evaluation)
    assert backoff.state() == Backoff().state()
    assert set(judged(Backoff(max_every=1), *[(5.0, 5.0)] * 20)) == {1}


@pytest.mark.parametrize("noted", range(10))
def test_it_goes_on_after_a_resume(noted):
    one, two = Backoff(), Backoff()
    evaluations = [(5.0, 5.0)] * 6 + [(4.0, 4.1)] + [(4.1, 4.1)] * 6
    judged(one, *evaluations[:noted])
    one.note_rollout(4.0)
    two.load(json.loads(json.dumps(one.state())))
    assert judged(one, *evaluations[noted:]) == judged(two, *evaluations[noted:]) and one.state() == two.state()
