"""The tuner on simulated machines, whose costs and acceptance are known."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from paceline.draft.acceptance import Acceptance
from paceline.draft.crowd import MARGIN
from paceline.draft.pace import Pace, rates
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.tuner import Prospect, Tuner

STRATEGIES = [Strategy.parse(s) for s in ("plain", "suffix:3", "neural:2", "neural:4", "neural:7", "neural:4x3/8")]
UNEVEN = [0.0] * 30 + [0.9] * 34  # how often guesses hold for each text


class Machine:
    """A pass costs a floor until too many tokens run at once; a draft costs a share of that per level."""

    def __init__(self, rate: dict[str, float], seed: int = 0, knee: int = 128, capture_s: float = 0.0):
        """What a batch size and a strategy take together for the first time, they take `capture_s` longer."""
        self.rate, self.knee, self.dice, self.capture_s = rate, knee, random.Random(seed), capture_s
        self.seen: set[tuple[int, Strategy]] = set()

    def cost(self, batch: int, s: Strategy) -> float:
        tokens = batch * (1 + s.nodes)
        draft = 0.15 * s.depth if s.drafter == "neural" else 0.02
        return 1e-3 * (max(1.0, tokens / self.knee) + (0 if s.plain else draft))

    def tokens(self, s: Strategy) -> float:
        rate, total, alive = self.rate.get(s.drafter, 0.0), 1.0, 1.0
        for _ in range(s.depth):
            alive *= rate
            total += alive
        return total

    def speed(self, batch: int, s: Strategy) -> float:
        return batch * self.tokens(s) / self.cost(batch, s)

    def round(self, tuner: Tuner, batch: int) -> Strategy:
        s = tuner.choose(batch)
        accepted = []
        for _ in range(batch):
            a = 0
            while a < s.depth and self.dice.random() < self.rate.get(s.drafter, 0.0):
                a += 1
            accepted.append(a)
        warm = (batch, s) in self.seen or not self.capture_s
        self.seen.add((batch, s))
        seconds = self.cost(batch, s) * self.dice.uniform(0.97, 1.1) + (0.0 if warm else self.capture_s)
        tuner.observe(batch, s, seconds, None if s.plain else accepted, warm=warm, exploring=tuner.exploring)
        return s


def play(tuner: Tuner, machine: Machine, batch: int, rounds: int) -> float:
    """The speed that its choices have on average: what it sees is noisy, what it is judged by is not."""
    chosen = [machine.round(tuner, batch) for _ in range(rounds)]
    return batch * sum(machine.tokens(s) for s in chosen) / sum(machine.cost(batch, s) for s in chosen)


def test_reaches_the_best_strategy_at_every_batch_size_and_plain_where_nothing_pays():
    alike = Prospect(rates=[0.8] * 40)
    machine, tuner = Machine({"neural": 0.8, "suffix": 0.3}), Tuner(STRATEGIES, 256, prospect=lambda: alike)
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


@pytest.mark.parametrize("hard", [0, 3, 25, 60])
def test_many_texts_of_one_length_are_not_slower_because_some_are_hard_to_guess(hard: int):
    """Most tokens per second are not the soonest end: texts whose guesses never hold are waited for. Without such
    texts guessing pays."""
    machine = Machine({}, knee=256)
    paces: dict[int, Pace] = {}
    tuner = Tuner(STRATEGIES, 128, prospect=lambda: Prospect(rates=rates(list(paces.values()))))

    def rollout(choose: Callable[[int], Strategy], watched: bool) -> float:
        left, total = dict.fromkeys(range(128), 384), 0.0
        while left:
            s, accepted = choose(len(left)), {}
            for i in left:
                holds = 0.97 if s.drafter == "neural" and i >= hard else 0.02
                accepted[i] = 0
                while accepted[i] < s.depth and machine.dice.random() < holds:
                    accepted[i] += 1
            seconds = machine.cost(len(left), s)
            if watched:
                told = None if s.plain else list(accepted.values())
                tuner.observe(len(left), s, seconds, told, warm=True, exploring=tuner.exploring)
                for i, held in accepted.items():
                    paces.setdefault(i, Pace())
                    if not s.plain:
                        paces[i].add(held, s.depth)
            total += seconds
            left = {i: n - 1 - accepted[i] for i, n in left.items() if n > 1 + accepted[i]}
            for i in paces.keys() - left.keys():
                del paces[i]
        return total

    plain = rollout(lambda _: PLAIN, watched=False)
    rollout(tuner.choose, watched=True)
    later = sum(rollout(tuner.choose, watched=True) for _ in range(4)) / 4
    assert later < (1.04 if hard else 0.8) * plain


def test_what_is_known_about_slow_texts_is_kept_and_slowly_forgotten():
    prospect = Prospect()
    machine, tuner = Machine({"neural": 0.8}, knee=150), Tuner(STRATEGIES, 64, explore=0.0, prospect=lambda: prospect)
    play(tuner, machine, 64, 50)
    assert not tuner.choose(64).plain
    prospect = Prospect(rates=UNEVEN)
    play(tuner, machine, 64, 50)
    prospect = Prospect()  # new texts, of which nothing is known yet
    tuner.choose(1)
    best = max(STRATEGIES, key=lambda s: machine.speed(64, s))
    assert machine.speed(64, best) > 1.5 * machine.speed(64, PLAIN)
    assert tuner.choose(64) == PLAIN, "a lead of a half is not enough for texts as uneven as these were"
    known = Tuner(STRATEGIES, 64, explore=0.0)
    known.restore(json.loads(json.dumps(tuner.state())))
    assert known.choose(64) == PLAIN, "saved with the rest"
    for _ in range(20):
        tuner.choose(1)
        chosen = [machine.round(tuner, 64) for _ in range(5)]
    assert not all(s.plain for s in chosen), "twenty rollouts that did not show it"


def test_the_last_texts_of_a_rollout_say_nothing_about_all_of_the_next():
    prospect = Prospect()
    machine, tuner = Machine({"neural": 0.8}, knee=150), Tuner(STRATEGIES, 64, explore=0.0, prospect=lambda: prospect)
    play(tuner, machine, 64, 50)
    prospect = Prospect(rates=UNEVEN)
    play(tuner, machine, 64, 50)
    assert tuner.choose(64) == PLAIN
    prospect = Prospect(rates=[0.8] * 40)  # the slow ones are left: as slow as each other
    play(tuner, machine, 40, 50)
    assert not tuner.choose(40).plain
    prospect = Prospect()
    tuner.choose(1)
    assert tuner.choose(64) == PLAIN


def test_slow_texts_count_where_texts_end_together():
    """In a long tail the one that is waited for may be any."""
    prospect = Prospect(rates=UNEVEN)
    for lengths in ([384] * 64, [80] * 60 + [4000] * 4):
        machine = Machine({"neural": 0.8}, knee=150)
        tuner = Tuner(STRATEGIES, 64, explore=0.0, prospect=lambda: prospect)
        play(tuner, machine, 64, 50)
        assert tuner.choose(64) == PLAIN, "nothing is known of how they end"
        tuner.ended(lengths)
        tuner.choose(1)
        play(tuner, machine, 64, 50)
        assert tuner.choose(64).plain == (len(set(lengths)) == 1)
        known = Tuner(STRATEGIES, 64, explore=0.0, prospect=lambda: prospect)
        known.restore(json.loads(json.dumps(tuner.state())))
        assert known.choose(64).plain == tuner.choose(64).plain, "saved with the rest"


def test_a_look_that_needs_graphs_waits_until_there_is_time_for_them():
    """Each strategy's first round at a size takes as long as fifty plain ones."""
    machine, tuner = Machine({"neural": 0.1, "suffix": 0.1}), Tuner(STRATEGIES, 64)
    met: set[Strategy] = set()
    plain = machine.cost(64, PLAIN)
    for _ in range(20000):
        s = tuner.choose(64)
        first = not s.plain and s not in met
        seconds = machine.cost(64, s) + (50 * plain if first else 0.0)
        if first and met:  # what the first one takes is not known before
            assert tuner.explored + seconds < tuner.allowed + 4 * plain
        met |= {s} if first else set()
        tuner.observe(64, s, seconds, None if s.plain else [0] * 64, warm=not first, exploring=tuner.exploring)
    assert len(met) > 2, "but they are looked at"


def test_exploration_is_bounded():
    machine, tuner = Machine({"neural": 0.8, "suffix": 0.3}), Tuner(STRATEGIES, 64)
    for batch in (64, 32, 8, 1):
        play(tuner, machine, batch, 500)
    assert tuner.explored <= 0.021 * tuner.seconds


def test_looks_in_vain_become_fewer_until_a_drafter_changes():
    machine, tuner = Machine({"neural": 0.85, "suffix": 0.3}, knee=40), Tuner(STRATEGIES, 256)

    def explored(rounds: int) -> float:
        spent, seconds = tuner.explored, tuner.seconds
        play(tuner, machine, 256, rounds)
        return (tuner.explored - spent) / (tuner.seconds - seconds)

    explored(1000)
    assert explored(2000) < 0.01, "half of what may be spent"
    tuner.renew()
    assert explored(1000) > 0.012


def test_what_looks_took_too_much_is_forgiven_when_a_drafter_changes():
    """A capture that took as long as ten thousand rounds, for a look that found nothing."""
    machine, tuner = Machine({"neural": 0.1, "suffix": 0.1}), Tuner(STRATEGIES, 64)

    def looks(rounds: int) -> int:
        found = 0
        for _ in range(rounds):
            machine.round(tuner, 64)
            found += tuner.exploring
        return found

    assert looks(400) > 0
    tuner.observe(64, STRATEGIES[-1], 10000 * machine.cost(64, PLAIN), None, warm=False, exploring=True)
    assert looks(1000) == 0
    tuner.renew()
    assert looks(400) > 0


def test_captures_of_what_is_only_looked_at_are_bounded_too():
    """A capture takes as long as a hundred rounds, and there are as many as batch sizes times strategies."""
    machine, tuner = Machine({"neural": 0.8, "suffix": 0.3}, capture_s=0.1), Tuner(STRATEGIES, 64)
    for _ in range(3):
        for batch in (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1):
            play(tuner, machine, batch, 100)
    assert tuner.explored <= 0.02 * tuner.seconds + 0.11, "one look may go beyond"
    best = max(machine.speed(1, s) for s in STRATEGIES)
    assert play(tuner, machine, 1, 200) > 0.9 * best, "what is expected to be best is captured nevertheless"


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


def test_a_graph_for_a_little_more_speed_is_not_captured_at_once():
    """What is best changes with the texts, and every change would have to be paid for."""
    met = []
    for capture_s in (0.0, 0.1):
        machine, tuner = Machine({"neural": 0.8, "suffix": 0.3}, capture_s=capture_s), Tuner(STRATEGIES, 16)
        dice = random.Random(0)
        for _ in range(40):
            machine.rate["neural"] = dice.uniform(0.5, 0.9)
            machine.seen |= {(16, machine.round(tuner, 16)) for _ in range(50)}
        met.append(len(machine.seen))
    assert met[0] == len(STRATEGIES), "where it costs nothing all of them"
    assert met[1] < met[0]


def test_new_texts_are_not_judged_by_the_last_ones_of_those_before():
    """The last text of a rollout cannot be guessed, and nothing is looked at that does not seem to pay."""
    machine, tuner = Machine({"neural": 0.8}, knee=256), Tuner(STRATEGIES, 32, explore=0.0)
    for _ in range(3):
        play(tuner, machine, 32, 60)
        machine.rate["neural"] = 0.02
        play(tuner, machine, 1, 150)
        assert sum(machine.round(tuner, 1).plain for _ in range(100)) > 90
        machine.rate["neural"] = 0.8
        assert not all(machine.round(tuner, 32).plain for _ in range(3)), "at once, because they usually hold"


def test_what_is_usual_is_where_new_texts_begin():
    seen = Acceptance()
    for now in range(1, 51):
        seen.observe(now, 2, [2] * 9 + [0])
    for now in range(51, 200):
        seen.observe(now, 2, [0])
    assert seen.tokens(2) < 1.1
    seen.start_over()
    assert 0.6 < seen.holds(0) < 0.9 and seen.holds(1) > 0.95
    assert seen.tokens(2) == pytest.approx(1 + seen.holds(0) * (1 + seen.holds(1)))
    for now in range(200, 203):
        seen.observe(now, 2, [0] * 10)
    assert seen.holds(0) < 0.1, "what is seen of them counts more"
    older = {"reached": [3.0], "held": [2.0], "rate": [0.5], "best": [0.8], "round": 7}
    assert Acceptance(**older).usually_reached == [3.0], "as it was saved before it kept this"


@pytest.mark.parametrize(("ms", "pays"), [(4.0, True), (40.0, False)])
def test_catching_up_with_many_texts_is_not_thought_to_take_what_it_took_with_one(ms, pays):
    """One text took a pass of 64 rows and so many milliseconds; for 64 of them passes of 4096 rows are to be made."""
    strategy = Strategy.parse("neural:4")
    tuner = Tuner([PLAIN, strategy], 64, explore=0.0, prospect=lambda: Prospect(1000.0, {"neural": 4096}))
    for batch in (1, 64):
        for _ in range(9):
            tuner.choose(batch)
            tuner.observe(batch, PLAIN, 1e-3, None, warm=True)
            tuner.observe(batch, strategy, 1.8e-3, [4] * batch, warm=True)
    tuner.observe(1, strategy, (1.8 + ms) / 1e3, [4], warm=False, made_up=64)
    decided = lambda: [tuner.choose(64) for _ in range(6)][-1]  # noqa: E731 - decisions stand for a few rounds
    assert decided() == (strategy if pays else PLAIN), "before it was measured with as many"
    for _ in range(9):
        tuner.observe(64, strategy, 11.8e-3, [4] * 64, warm=False, made_up=4096)
    assert decided() == strategy, "once it was"


def test_state_survives_as_json():
    machine, tuner = Machine({"neural": 0.8}), Tuner(STRATEGIES, 16)
    play(tuner, machine, 16, 100)
    tuner.observe(16, STRATEGIES[2], 1.0, [2] * 16, warm=False, made_up=640)
    play(tuner, machine, 3, 100)
    other = Tuner(STRATEGIES, 16)
    other.restore(json.loads(json.dumps(tuner.state())))
    assert other.state() == tuner.state()
    assert other.choose(16) == tuner.choose(16)


def test_without_drafters_there_is_nothing_to_choose():
    tuner = Tuner([PLAIN], 8)
    assert {tuner.choose(b) for b in range(1, 9)} == {PLAIN}


def test_trees_are_for_few_texts():
    """However well they would do: beyond so many tokens to check, they are not even looked at."""
    tree = Strategy.parse("neural:8x4/24")
    assert [tree.fits(batch) for batch in (1, 20, 21)] == [True, True, False] and Strategy.parse("neural:7").fits(10**6)
    assert [tree.most_rows(batch) for batch in (4, 20, 256)] == [100, 500, 500] and PLAIN.most_rows(256) == 256
    tuner = Tuner([PLAIN, tree], 64)
    machine = Machine({"neural": 0.95}, knee=10**6)  # where checking more costs nothing
    assert all(machine.round(tuner, 64).plain for _ in range(300))
    assert sum(machine.round(tuner, 12) == tree for _ in range(200)) > 150
