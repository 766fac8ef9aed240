"""The tuner on simulated machines, whose costs and acceptance are known."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest

from paceline.draft.acceptance import PRIOR, Acceptance
from paceline.draft.decision import BatchContext, Choice, RoundOutcome
from paceline.draft.ladder import batch_ladder, bucket
from paceline.draft.registry import default_strategies
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.tuner import MARGIN, Tuner
from paceline.draft.tuner_state import TunerState
from paceline.files import reading

from .machine import STRATEGIES, Machine, play, told


@pytest.mark.parametrize("seed", range(4))
def test_reaches_the_best_strategy_at_every_batch_size_and_plain_where_nothing_pays(seed: int):
    machine, tuner = Machine({"neural": 0.8, "suffix": 0.3}, seed), Tuner(STRATEGIES, 256)
    for batch in (256, 64, 16, 4, 1):
        play(tuner, machine, batch, 150)
        best = max(machine.speed(batch, s) for s in STRATEGIES)
        lead = best / machine.speed(batch, PLAIN)  # a small one is not taken
        assert play(tuner, machine, batch, 200) > (0.95 if lead > 1.2 else 0.97 * MARGIN) * best, batch
    assert max(STRATEGIES, key=lambda s: machine.speed(256, s)) == PLAIN


def test_a_large_batch_where_nothing_pays_is_not_slower_from_the_start():
    machine, tuner = Machine({"neural": 0.85, "suffix": 0.3}, knee=40), Tuner(STRATEGIES, 256)
    assert max(STRATEGIES, key=lambda s: machine.speed(256, s)) == PLAIN
    assert play(tuner, machine, 256, 300) > 0.97 * machine.speed(256, PLAIN)


def test_plain_decoding_is_run_for_two_rounds_and_the_second_one_counts():
    strategy = Strategy.parse("neural:4")
    tuner = Tuner([PLAIN, strategy], 8, explore=0.0)
    told(tuner, 8, PLAIN, 1e-3, None)
    told(tuner, 8, strategy, 0.5e-3, [4] * 8)
    tuner.choose(BatchContext(8))
    tuner.observe(RoundOutcome(Choice(PLAIN, first=True), 4, 9e-3, None))
    assert tuner.state()["costs"][0] == {"strategy": "plain", "batch": 4, "round": 1, "seconds": [9e-3]}
    tuner.observe(RoundOutcome(Choice(PLAIN), 4, 1e-3, None))
    tuner.observe(RoundOutcome(Choice(PLAIN, first=True), 4, 9e-3, None))
    assert tuner.state()["costs"][0]["seconds"] == [1e-3], "the first one builds what the next ones reuse"
    fresh = Tuner([PLAIN, strategy], 8)
    told(fresh, 8, PLAIN, 1e-3, None)
    told(fresh, 8, strategy, 0.5e-3, [4] * 8)
    assert not fresh.choose(BatchContext(8)).strategy.plain
    first = fresh.choose(BatchContext(4))
    assert first.strategy.plain and first.first, "nothing is known of this batch size"
    assert fresh.choose(BatchContext(8)) == Choice(PLAIN)
    assert not fresh.choose(BatchContext(8)).strategy.plain


def test_exploration_is_bounded():
    machine, tuner = Machine({"neural": 0.8, "suffix": 0.3}), Tuner(STRATEGIES, 64)
    trials_s = 0.0
    for batch in (64, 32, 8, 1):
        for _ in range(500):
            spent = tuner.total_s
            trials_s += machine.round(tuner, batch).trial * (tuner.total_s - spent)
    assert 0.0 < tuner.explored_s <= 0.021 * tuner.total_s and tuner.explored_s == pytest.approx(trials_s)
    never = Tuner(STRATEGIES, 64, explore=0.0)
    assert not any(machine.round(never, 8).trial for _ in range(500))


def test_fruitless_trials_lose_little_and_come_at_once_when_a_drafter_changes():
    machine, tuner = Machine({"neural": 0.85, "suffix": 0.3}, knee=40), Tuner(STRATEGIES, 256)

    def explored(rounds: int) -> float:
        spent, seconds = tuner.explored_s, tuner.total_s
        play(tuner, machine, 256, rounds)
        return (tuner.explored_s - spent) / (tuner.total_s - seconds)

    explored(1000)
    assert 0.0 < explored(2000) < 0.01, "half of what may be spent"
    tuner.renew()
    assert sum(machine.round(tuner, 256).trial for _ in range(2)) > 0


def test_every_drafter_has_its_trials():
    """The cheaper one does not use up the time of the other."""
    machine, tuner = Machine({"neural": 0.1, "suffix": 0.1}), Tuner(STRATEGIES, 8)
    tried = [c.strategy.drafter for c in (machine.round(tuner, 8) for _ in range(3000)) if c.trial]
    assert min(tried.count("neural"), tried.count("suffix")) > 5


def test_notices_a_drafter_that_went_bad_and_one_that_came_back():
    machine, tuner = Machine({"neural": 0.85, "suffix": 0.1}), Tuner(STRATEGIES, 8)
    play(tuner, machine, 8, 300)
    good = play(tuner, machine, 8, 100)
    machine.rate["neural"] = 0.02
    play(tuner, machine, 8, 100)
    assert play(tuner, machine, 8, 100) > 0.97 * machine.speed(8, PLAIN)
    machine.rate["neural"] = 0.85
    play(tuner, machine, 8, 200)
    assert play(tuner, machine, 8, 100) > 0.95 * good


def test_a_drafter_that_was_bad_for_long_has_a_trial_at_once_when_it_changes():
    soon = {True: 0, False: 0}
    for renewed in soon:
        for seed in range(8):
            machine, tuner = Machine({"neural": 0.02, "suffix": 0.1}, seed), Tuner(STRATEGIES, 8)
            play(tuner, machine, 8, 1000 + 10 * seed)
            machine.rate["neural"] = 0.85
            if renewed:
                tuner.renew()
            soon[renewed] += any(machine.round(tuner, 8).strategy.drafter == "neural" for _ in range(4))
    assert soon[True] == 8 and soon[False] <= 3, soon


def test_new_sequences_are_not_judged_by_the_last_ones_of_those_before():
    """The last sequence of a rollout cannot be drafted for, and there are no trials."""
    machine, tuner = Machine({"neural": 0.8}, knee=256), Tuner(STRATEGIES, 32, explore=0.0)
    for _ in range(3):
        play(tuner, machine, 32, 60)
        machine.rate["neural"] = 0.02
        play(tuner, machine, 1, 150)
        assert sum(machine.round(tuner, 1).strategy.plain for _ in range(100)) > 90
        machine.rate["neural"] = 0.8
        assert not all(machine.round(tuner, 32).strategy.plain for _ in range(3)), "at once, as is usual"


def test_usual_acceptance_is_where_new_sequences_start():
    seen = Acceptance()
    assert seen.accept_length(2) == pytest.approx(1 + PRIOR + PRIOR**2)
    for now in range(1, 51):
        seen.observe(now, 2, [2] * 9 + [0])
    for now in range(51, 200):
        seen.observe(now, 2, [0])
    assert seen.accept_length(2) < 1.1
    seen.start_over()
    rate = (50 * 9) / (50 * 10 + 149)
    assert seen.accept_length(1) == pytest.approx(1 + rate, abs=0.01)
    for now in range(200, 203):
        seen.observe(now, 2, [0] * 10)
    assert seen.accept_length(1) < 1.1, "what is seen of them counts more"


def test_rates_that_rise_with_depth_count_for_a_lone_sequence_only():
    """Half of the sequences take every draft token, half none: the average sequence takes half of them."""
    seen = Acceptance()
    for now in range(1, 200):
        seen.observe(now, 4, [4] * 8 + [0] * 8)
    assert seen.accept_length(4, lone=True) == pytest.approx(1 + 4 / 2, abs=0.02)
    assert seen.accept_length(4) == pytest.approx(1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16, abs=0.02)
    assert seen.accept_length(6) > seen.accept_length(4), "deeper than anything that was observed"


def test_a_draft_says_nothing_of_depths_that_it_did_not_reach():
    seen = Acceptance()
    for now in range(1, 100):
        seen.observe(now, 4, [4] * 9 + [3])
    before = seen.accept_length(4, lone=True)
    for now in range(100, 110):
        seen.observe(now, 2, [2] * 10)
    assert seen.accept_length(4, lone=True) == pytest.approx(before, abs=0.03)


@pytest.mark.parametrize(("ms", "left", "pays"), [(4.0, 1000.0, True), (400.0, 1000.0, False), (30.0, 4.0, False)])
def test_a_drafter_that_has_to_catch_up_must_pay_for_it(ms: float, left: float, pays: bool):
    """Passes of 4096 rows take so long, while so many tokens are left to the sequences' limits."""
    strategy = Strategy.parse("neural:4")
    tuner = Tuner([PLAIN, strategy], 64, explore=0.0)
    for _ in range(9):
        told(tuner, 64, PLAIN, 1e-3, None)
        told(tuner, 64, strategy, 1.8e-3, [4] * 64)
    tuner.choose(BatchContext(64))
    told(tuner, 64, strategy, (1.8 + ms) / 1e3, [4] * 64, catch_up_rows=4096)
    assert tuner.choose(BatchContext(64, left)).strategy == strategy, "nothing to catch up with"
    for _ in range(1 if pays else 2):
        assert tuner.choose(BatchContext(64, left, {"neural": 4096})).strategy == (strategy if pays else PLAIN)
    assert tuner.choose(BatchContext(64, left, {"suffix": 4096})).strategy == strategy


def test_rounds_that_captured_a_graph_or_caught_up_are_no_costs():
    strategy = Strategy.parse("neural:4")
    tuner = Tuner([PLAIN, strategy], 8, explore=0.0)
    for _ in range(20):
        told(tuner, 8, PLAIN, 1e-3, None)
        told(tuner, 8, strategy, 1.8e-3, [4] * 8)
    for _ in range(20):
        told(tuner, 8, strategy, 9.0, [4] * 8, captured=True)
        told(tuner, 8, strategy, 9.0, [4] * 8, catch_up_rows=64)
        told(tuner, 8, PLAIN, 9.0, None, captured=True)
    assert tuner.choose(BatchContext(8)).strategy == strategy


def test_rounds_may_be_chosen_before_the_last_one_was_observed():
    machine, tuner = Machine({"neural": 0.8, "suffix": 0.3}), Tuner(STRATEGIES, 8)
    flying: list[Choice] = [tuner.choose(BatchContext(8))]
    chosen = []
    for _ in range(400):
        flying.append(tuner.choose(BatchContext(8)))
        choice = flying.pop(0)
        s = choice.strategy
        accepted = None if s.plain else machine.accepted(s, 8)
        tuner.observe(RoundOutcome(choice, 8, machine.cost(8, s), accepted))
        chosen.append(s)
    best = max(machine.speed(8, s) for s in STRATEGIES)
    late = chosen[200:]
    speed = 8 * sum(machine.accept_length(s) for s in late) / sum(machine.cost(8, s) for s in late)
    assert speed > 0.95 * best


def test_a_decision_takes_no_time():
    tuner, machine = Tuner(default_strategies(["suffix", "neural"]), 128), Machine({"neural": 0.8, "suffix": 0.4})
    play(tuner, machine, 128, 300)
    context = BatchContext(128, 500.0, {"neural": 640})
    took = []
    for _ in range(300):
        started = time.perf_counter()
        tuner.choose(context)
        took.append(time.perf_counter() - started)
    assert sorted(took)[30] < 1e-4, "about 15 microseconds where nothing else runs"


def test_state_survives_as_json():
    machine, tuner = Machine({"neural": 0.8}), Tuner(STRATEGIES, 16)
    play(tuner, machine, 16, 100)
    told(tuner, 16, STRATEGIES[2], 1.0, [2] * 16, catch_up_rows=640)
    play(tuner, machine, 3, 100)
    other = Tuner(STRATEGIES, 16)
    state = json.loads(json.dumps(tuner.state()))
    reading.check(TunerState, state, "state")
    other.restore(state)
    assert other.state() == tuner.state()
    assert other.choose(BatchContext(16)) == tuner.choose(BatchContext(16))
    fewer = Tuner(STRATEGIES[:3], 8)
    fewer.restore(state)
    machine.round(fewer, 8)


def test_states_of_older_versions_load():
    counts = {"reached": [90.0, 60.0], "held": [80.0, 50.0], "rate": [0.5, 0.5], "best": [0.8, 0.8], "round": 90}
    costs = [("plain", 1e-3), ("neural:2", 1.2e-3)]
    oldest = {
        "round": 100,
        "seconds": 2.0,
        "explored": 0.01,
        "costs": [{"strategy": s, "batch": 8, "round": 99, "seconds": [seconds] * 5} for s, seconds in costs],
        "acceptance": {"neural": counts, "gone": counts},
    }
    newer = oldest | {
        "allowed": 0.04,
        "catch_ups": [{"drafter": "neural", "batch": 8, "seconds": [1e-5]}],
        "crowd": {"together": 1.0, "rates": [{"batch": 8, "unseen": 0, "rates": [0.5]}]},
        "acceptance": {"neural": counts | {"usually_reached": [900.0, 600.0], "usually_held": [800.0, 500.0]}},
    }
    for state in (oldest, newer):
        reading.check(TunerState, state, "state")
        tuner = Tuner(STRATEGIES, 8, explore=0.0)
        tuner.restore(json.loads(json.dumps(state)))
        assert (tuner.round, tuner.total_s, tuner.explored_s) == (100, 2.0, 0.01)
        assert tuner.choose(BatchContext(8)).strategy.drafter == "neural"
        machine = Machine({"neural": 0.8})
        play(tuner, machine, 8, 50)
        reading.check(TunerState, tuner.state(), "state")


def test_without_drafters_there_is_nothing_to_choose():
    tuner = Tuner([PLAIN], 8)
    for batch in range(1, 9):
        assert tuner.choose(BatchContext(batch)) == Choice(PLAIN)
        told(tuner, batch, PLAIN, 1e-3, None)
    assert all(tuner.choose(BatchContext(batch)) == Choice(PLAIN) for batch in range(1, 9))


def test_strategies_of_somebody_else_are_ignored():
    tuner = Tuner(STRATEGIES, 8)
    told(tuner, 8, Strategy.parse("other:3"), 1.0, [3] * 8)
    assert tuner.total_s == 0.0


def test_trees_are_for_few_sequences():
    """However well they would do: beyond so many tokens to verify, they are not even tried."""
    tree = Strategy.parse("neural:8x4/24")
    assert [tree.fits(batch) for batch in (1, 20, 21)] == [True, True, False] and Strategy.parse("neural:7").fits(10**6)
    assert [tree.most_rows(batch) for batch in (4, 20, 256)] == [100, 500, 500] and PLAIN.most_rows(256) == 256
    tuner = Tuner([PLAIN, tree], 64)
    machine = Machine({"neural": 0.95}, knee=10**6)  # where verifying more costs nothing
    assert all(machine.round(tuner, 64).strategy.plain for _ in range(300))
    assert sum(machine.round(tuner, 12).strategy == tree for _ in range(200)) > 150


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 100, 128, 513])
def test_the_ladder_of_batch_sizes(most: int):
    ladder = batch_ladder(most)
    assert ladder[0] == 1 and ladder[-1] == most and ladder == sorted(set(ladder))
    assert all(b <= 1.5 * a for a, b in pairwise(ladder[1:]))
    for batch in range(1, most + 1):
        size = bucket(ladder, batch)
        assert size in ladder and size >= batch and not any(batch <= n < size for n in ladder)
    assert bucket(ladder, most + 1) == most
