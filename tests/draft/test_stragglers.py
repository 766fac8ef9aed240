"""Sequences for which drafts are accepted least: what is known of them, and that nobody waits for them longer than it
pays."""

from __future__ import annotations

import json
from statistics import fmean

import numpy as np
import pytest

from paceline.draft.acceptance import FADE
from paceline.draft.decision import BatchContext, Choice, RoundOutcome
from paceline.draft.stragglers import Stragglers, slowest
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.tuner import Tuner

from .machine import STRATEGIES, Machine, play, told


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


class Rollout:
    """Sequences of which so many run; each round gives all but the last one 3 draft tokens, and that one none."""

    def __init__(self, stragglers: Stragglers):
        self.stragglers = stragglers
        self.before = 0

    def round(self, batch: int, *ended: int, served: bool = False) -> None:
        self.stragglers.running(batch, self.before, served)
        self.stragglers.observe([3] * (batch - 1) + [0], ended)
        self.before = batch

    def gain(self) -> float:
        """As it is known when the next rollout begins."""
        self.stragglers.running(100, self.before, False)
        return self.stragglers.gain


def played(*rounds: tuple) -> float:
    rollout = Rollout(Stragglers())
    for batch, *ended in rounds:
        rollout.round(batch, *ended)
    return rollout.gain()


ROUNDS = [(4,)] * 19
"""19 rounds of four sequences, which give the last one 20 tokens with that of its prompt."""
END = (4, 80, 80, 80, 21)


def test_drafts_that_gave_the_last_sequence_nothing():
    assert played(*ROUNDS, END) > 0.9, "80 tokens in 20 rounds: the longest is no slow one"
    assert played(*ROUNDS, (4, 21, 21, 21, 21)) == 0.0


def test_sequences_that_are_taken_in_over_some_rounds_began_together():
    assert played((2,), (3,), *ROUNDS[2:], (4, 21, 21, 21, 21)) == 0.0


@pytest.mark.parametrize(
    "rounds",
    [
        [*ROUNDS[:10], (4, 11), (3,), (4,), *ROUNDS[:7], (4, 21, 21, 21, 8)],
        [*ROUNDS[:10], (3,), (3,), (4,), *ROUNDS[:6], (4, 21, 21, 21, 21)],
        [*ROUNDS, (4, 21, 21, 21), (1,)],
        [(4,), (4, 3, 3, 3, 3)],
    ],
    ids=["one came later", "one left and came back", "one goes on", "few rounds"],
)
def test_otherwise_nothing_is_measured(rounds):
    assert played(*rounds) == 1.0


def test_where_requests_wait_for_a_slot_nothing_is_measured():
    rollout = Rollout(Stragglers())
    for _ in range(19):
        rollout.round(4, served=True)
    rollout.round(4, 21, 21, 21, 21)
    assert rollout.gain() == 0.0, "they waited only until all were taken in"
    for _ in range(19):
        rollout.round(4, 21, served=True)
    rollout.round(4, 21, 21, 21, 21)
    rollout.stragglers.gain = 0.5
    assert rollout.gain() == 0.5


def test_rollouts_of_a_single_sequence_after_one_another():
    rollout = Rollout(Stragglers())
    for _ in range(5):
        for _ in range(10):
            rollout.stragglers.running(1, rollout.before, False)
            rollout.stragglers.observe([3], [])
            rollout.before = 1
        rollout.stragglers.running(1, 1, False)
        rollout.stragglers.observe([3], [1 + 11 * 4])
    assert rollout.gain() == 1.0
