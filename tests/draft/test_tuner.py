"""The tuner on simulated machines, whose costs and acceptance are known."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest

from paceline.draft.acceptance import FADE, PRIOR, Acceptance
from paceline.draft.decision import BatchContext, Choice, RoundOutcome
from paceline.draft.ladder import batch_ladder, bucket
from paceline.draft.registry import default_strategies
from paceline.draft.stragglers import slowest
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.tuner import MARGIN, Tuner
from paceline.draft.tuner_state import TunerState
from paceline.files import reading

STRATEGIES = [Strategy.parse(s) for s in ("plain", "suffix:3", "neural:2", "neural:4", "neural:7", "neural:4x3/8")]


class Machine:
    """A pass costs a floor until too many tokens run at once; a draft costs a share of that per level."""

    def __init__(self, rate: dict[str, float], seed: int = 0, knee: int = 128):
        self.rate = rate
        self.knee = knee
        self.dice = random.Random(seed)

    def cost(self, batch: int, s: Strategy) -> float:
        tokens = batch * (1 + s.nodes)
        draft = 0.15 * s.depth if s.drafter == "neural" else 0.02
        return 1e-3 * (max(1.0, tokens / self.knee) + (0 if s.plain else draft))

    def accept_length(self, s: Strategy) -> float:
        return sum(self.rate.get(s.drafter, 0.0) ** level for level in range(s.depth + 1))

    def speed(self, batch: int, s: Strategy) -> float:
        return batch * self.accept_length(s) / self.cost(batch, s)

    def accepted(self, s: Strategy, batch: int) -> list[int]:
        return [self.draw(s.depth, self.rate.get(s.drafter, 0.0)) for _ in range(batch)]

    def draw(self, depth: int, rate: float) -> int:
        count = 0
        while count < depth and self.dice.random() < rate:
            count += 1
        return count

    def round(self, tuner: Tuner, batch: int) -> Choice:
        choice = tuner.choose(BatchContext(batch))
        s = choice.strategy
        seconds = self.cost(batch, s) * self.dice.uniform(0.97, 1.1)
        tuner.observe(RoundOutcome(choice, batch, seconds, None if s.plain else self.accepted(s, batch)))
        return choice


def play(tuner: Tuner, machine: Machine, batch: int, rounds: int) -> float:
    """The speed that its choices have on average: what it sees is noisy, what it is judged by is not."""
    chosen = [machine.round(tuner, batch).strategy for _ in range(rounds)]
    return batch * sum(machine.accept_length(s) for s in chosen) / sum(machine.cost(batch, s) for s in chosen)


def told(tuner: Tuner, batch: int, s: Strategy, seconds: float, accepted: list[int] | None, **more) -> None:
    tuner.observe(RoundOutcome(Choice(s), batch, seconds, accepted, **more))


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


class EqualLengths:
    """Sequences that all have 384 tokens, of which the `hard` first ones hardly ever have a draft token accepted."""

    def __init__(self, count: int, hard: int, knee: int):
        self.count = count
        self.hard = hard
        self.machine = Machine({}, knee=knee)
        self.dice = np.random.default_rng(0)

    def rollout(self, tuner: Tuner | None) -> float:
        """Seconds; without a tuner those of plain decoding."""
        left = np.full(self.count, 384)
        easy = np.arange(self.count) >= self.hard
        reached = np.zeros(self.count)
        accepted = np.zeros(self.count)
        total = 0.0
        while len(left):
            context = BatchContext(len(left), slowest=slowest(reached, accepted))
            choice = tuner.choose(context) if tuner else Choice(PLAIN)
            s = choice.strategy
            rates = np.where(easy, 0.97, 0.02) if s.drafter == "neural" else np.full(len(left), 0.02)
            drawn = np.logical_and.accumulate(self.dice.random((len(left), s.depth)) < rates[:, None], 1).sum(1)
            if not s.plain:
                reached = FADE * reached + np.minimum(drawn + 1, s.depth)
                accepted = FADE * accepted + drawn
            left = left - 1 - drawn
            seconds = self.machine.cost(len(drawn), s)
            total += seconds
            if tuner:
                told = None if s.plain else drawn.tolist()
                ended = [384] * int((left <= 0).sum())
                tuner.observe(RoundOutcome(choice, len(drawn), seconds, told, ended=ended))
            left, easy, reached, accepted = (column[left > 0] for column in (left, easy, reached, accepted))
        return total

    def times_plain(self) -> float:
        tuner = Tuner(STRATEGIES, 128)
        plain = self.rollout(None)
        self.rollout(tuner)
        return fmean(self.rollout(tuner) for _ in range(4)) / plain


@pytest.mark.parametrize("hard", [0, 1, 3, 25, 60, 64])
def test_sequences_of_one_length_are_not_slower_because_some_are_hard_to_draft_for(hard: int):
    """Most tokens per second are not the soonest end: the step ends with the slowest sequence. Without hard ones
    drafting pays."""
    found = EqualLengths(128, hard, knee=256).times_plain()
    assert found < (1.04 if hard else 0.8), found


@pytest.mark.parametrize(("count", "knee"), [(32, 128), (8, 64)])
def test_one_hard_sequence_among_few(count: int, knee: int):
    """Until it is known to be one, which takes the larger a share of the time the more drafting gives the others."""
    assert EqualLengths(count, 0, knee).times_plain() < 0.5
    found = EqualLengths(count, 1, knee).times_plain()
    assert found < 1.15, found


def test_the_slowest_sequence():
    reached = np.full(16, 40.0)
    alike = slowest(reached, 0.8 * reached)
    assert alike == 1.0, "chance"
    one = 0.8 * reached
    one[3] = 0.0
    ratio = slowest(reached, one)
    assert ratio is not None and 0.1 < ratio < 0.4
    assert slowest(reached / 10, one / 10) is None, "too little is known"
    few = np.concatenate([reached, [1.0]])
    assert slowest(few, np.concatenate([0.8 * reached, [0.0]])) > 0.8, "one draft token says nothing"
    assert slowest(reached, np.zeros(16)) == 1.0, "all are as slow"


def test_by_chance_alone_no_sequence_is_a_straggler():
    dice = np.random.default_rng(0)
    found = [slowest(np.full(128, n), dice.binomial(int(n), 0.8, 128)) for n in (10.0, 30.0, 100.0) for _ in range(20)]
    assert all(ratio is not None and ratio > 0.7 for ratio in found) and fmean(found) > 0.85  # type: ignore[type-var]


def test_stragglers_count_where_sequences_end_together():
    """In a long tail the one that is waited for may be any."""
    for lengths in ([384] * 64, [80] * 60 + [4000] * 4):
        machine, tuner = Machine({"neural": 0.8}, knee=150), Tuner(STRATEGIES, 64)
        play(tuner, machine, 64, 300)
        tuner.explore = 0.0
        assert not tuner.choose(BatchContext(64)).strategy.plain
        hard = BatchContext(64, slowest=0.0)
        assert tuner.choose(hard).strategy.plain, "nothing is known of how they end"
        told(tuner, 64, PLAIN, machine.cost(64, PLAIN), None, ended=lengths)
        tuner.choose(BatchContext(1))
        flat = len(set(lengths)) == 1
        assert tuner.choose(hard).strategy.plain == flat
        known = Tuner(STRATEGIES, 64, explore=0.0)
        known.restore(json.loads(json.dumps(tuner.state())))
        assert known.choose(BatchContext(64)).strategy.plain == flat, "saved with the rest"


def test_what_is_known_about_stragglers_is_kept_and_slowly_forgotten():
    machine, tuner = Machine({"neural": 0.8}, knee=150), Tuner(STRATEGIES, 64)
    play(tuner, machine, 64, 300)
    tuner.explore = 0.0
    assert tuner.choose(BatchContext(64, slowest=0.0)).strategy.plain
    play(tuner, machine, 40, 50)
    assert not tuner.choose(BatchContext(40)).strategy.plain, "the slow ones are left: as slow as each other"
    assert tuner.choose(BatchContext(64)).strategy.plain, "new sequences of which nothing is known yet"
    assert tuner.choose(BatchContext(64)).strategy.plain, "two rounds in a row"
    for _ in range(100):
        tuner.stragglers.start_over()
    assert not tuner.choose(BatchContext(64)).strategy.plain, "a hundred rollouts that did not show it"


def test_a_few_drafts_do_not_outweigh_what_is_known_of_stragglers():
    """What little is known of new sequences cannot tell that none of them is slow."""
    machine, tuner = Machine({"neural": 0.8}, knee=150), Tuner(STRATEGIES, 64)
    play(tuner, machine, 64, 300)
    tuner.explore = 0.0
    tuner.stragglers.see(64, 0.0)
    for _ in range(3):
        tuner.stragglers.see(64, 1.0)
    assert tuner.choose(BatchContext(64, slowest=1.0)).strategy.plain
    for _ in range(100):
        tuner.stragglers.see(64, 1.0)
    tuner.choose(BatchContext(64))
    assert not tuner.choose(BatchContext(64)).strategy.plain, "many rounds can"
    tuner.choose(BatchContext(64, slowest=0.5))
    assert tuner.stragglers.ratios[64] == 0.5, "one is slow"


def test_what_drafts_gave_the_sequence_that_ended_last_is_known_of_the_last_rollout():
    """Of 64 sequences of 384 tokens one has no draft accepted, which nothing but the number of rounds tells."""
    machine, tuner = Machine({"neural": 0.8}, knee=150), Tuner(STRATEGIES, 64)
    play(tuner, machine, 64, 300)
    tuner.explore = 0.0
    tuner.choose(BatchContext(1))
    tuner.choose(BatchContext(64))
    assert not tuner.choose(BatchContext(64)).strategy.plain
    for slow in (True, False):
        told(tuner, 64, PLAIN, machine.cost(64, PLAIN), None)
        for _ in range(50):
            told(tuner, 64, Strategy.parse("neural:3"), 2e-3, [3] * 63 + [0])
        told(tuner, 1, PLAIN, 1e-3, None, ended=[1 + 52 if slow else 1 + 52 + 150] * 64)
        tuner.choose(BatchContext(1))
        tuner.choose(BatchContext(64))
        assert tuner.choose(BatchContext(64)).strategy.plain == slow
        known = Tuner(STRATEGIES, 64)
        known.restore(json.loads(json.dumps(tuner.state())))
        assert known.stragglers.gain == tuner.stragglers.gain
        assert tuner.stragglers.gain < 0.1 if slow else tuner.stragglers.gain > 0.9


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
