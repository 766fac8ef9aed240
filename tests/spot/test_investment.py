from __future__ import annotations

from math import exp, log

import pytest

from paceline.spot.investment import FIRST_STEPS, PAYBACK, RISK, USUAL_SLOPE, Decision, LearningCurve, decide


def faster(accept_length: float) -> float:
    """A rollout of ten seconds, of which two are not decoding."""
    return 2 + 8 / accept_length


def trained(seconds: float, accept_length: float = 1.0, step_s: float = 0.05) -> LearningCurve:
    return LearningCurve(6.0, accept_length, seconds, step_s)


def test_what_cannot_pay_back_is_not_invested():
    assert decide(trained(0), faster, steps_left=0, least_s=0.5) == Decision(0.0)
    assert decide(trained(0), lambda accept_length: 10.0, 1000, 0.5).seconds == 0, "nothing is faster with a drafter"
    assert decide(trained(0), faster, 1, least_s=10.0).seconds == 0, "evaluating it takes longer than all that it saves"
    assert decide(trained(100, accept_length=6.0), faster, 1000, 0.5).seconds == 0, "it cannot get better"


def test_more_steps_are_worth_more_training_and_a_better_drafter_less():
    plans = [decide(trained(0), faster, steps, 0.5).planned_s for steps in (5, 30, 300)]
    assert 0 < plans[0] < plans[1] < plans[2]
    later = [decide(trained(t, a), faster, 30, 0.5).planned_s for t, a in ((0, 1.0), (10, 2.2), (60, 4.0))]
    assert later[0] > later[1] > later[2]


@pytest.mark.parametrize("steps", [12, 30, 1000])
def test_the_plan_is_the_best_amount_and_expects_its_payback(steps):
    curve = trained(4.0, 1.8)
    curve.trained(1.0, 20)
    curve.measured(1.6, 1.8)
    decision = decide(curve, faster, steps, 0.5)
    risky = lambda x: x > RISK * steps * faster(1.8)  # noqa: E731
    gain = lambda x: steps * (faster(1.8) - faster(curve.after(x, risky(x)))) / PAYBACK - x  # noqa: E731
    assert decision.saved_s == pytest.approx(steps * (faster(1.8) - faster(decision.accept_length)))
    assert decision.saved_s >= PAYBACK * decision.planned_s
    amounts = [0.5 * 1.25**n for n in range(60)]
    assert gain(decision.planned_s) == pytest.approx(max(map(gain, amounts)))


def test_beyond_the_risk_only_what_was_measured_counts():
    cautious = decide(trained(0.0), faster, 1000, 0.5)
    assert cautious.planned_s <= RISK * 1000 * faster(1.0)
    proven = trained(0.0)
    proven.trained(20.0, 400)
    proven.measured(1.0, 2.5)
    proven.invested_s = RISK * 1000 * faster(1.0)
    assert decide(proven, faster, 1000, 0.5).seconds > 0


def test_it_is_measured_again_before_training_has_grown_by_much():
    decision = decide(trained(10.0, 2.0), faster, 10_000, 0.5)
    assert decision.planned_s > 100
    assert decision.seconds <= 0.5 * (10 + FIRST_STEPS * 0.05)


def test_a_first_stretch_may_bring_nothing_if_a_longer_one_is_worth_it():
    """Below an accept length of two a drafter does not pay: what counts is where training leads."""
    flat = lambda accept_length: 10.0 if accept_length < 2 else 20 / accept_length  # noqa: E731
    decision = decide(trained(0), flat, 50, 0.5)
    assert decision.seconds > 0 and decision.accept_length > 2


def test_the_curve_is_what_was_measured():
    curve = trained(0.0)
    assert curve.slope() == USUAL_SLOPE
    accept_length = 1.0
    offset = FIRST_STEPS * curve.step_s
    for _ in range(6):  # each stretch makes the training longer by a factor of e and brings 0.3
        curve.trained((exp(1) - 1) * (curve.trained_s + offset), 1000)
        curve.step_s = 0.05
        curve.measured(accept_length, accept_length + 0.3)
        accept_length += 0.3
    assert 0.3 < curve.slope() < 0.6
    expected = curve.accept_length + curve.slope() * log(2)
    assert curve.after(curve.trained_s + offset) == pytest.approx(expected)
    assert curve.after(1e9) <= 6.0


def test_a_drafter_that_does_not_learn_is_given_up():
    """However much would be saved, what is risked on a drafter that learns nothing is a small part of it."""
    curve = trained(0.0)
    rollout_s = lambda accept_length: 100 / accept_length  # noqa: E731
    invested = 0.0
    for _ in range(200):
        decision = decide(curve, rollout_s, 30, 0.5)
        if not decision.seconds:
            break
        invested += decision.seconds
        curve.invested_s += decision.seconds
        curve.trained(decision.seconds, round(decision.seconds / 0.05))
        curve.measured(1.0, 1.0)
    else:
        pytest.fail("it never stops")
    assert invested <= RISK * 30 * 100


def test_new_answers_are_a_new_chance():
    curve = trained(10.0, 2.0)
    curve.trained(10.0, 200)
    curve.measured(2.0, 2.0)
    before = curve.slope()
    curve.next_step()
    assert before < curve.slope() < USUAL_SLOPE


def test_its_state_is_restored():
    curve = trained(3.0, 1.7)
    curve.trained(2.0, 40)
    curve.measured(1.7, 1.9)
    curve.trained(1.0, 20)
    assert LearningCurve(6.0, **curve.state()) == curve
