"""The tuner on simulated machines, whose costs and acceptance are known."""

from __future__ import annotations

import json
import random

from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.tuner import MARGIN, Tuner

STRATEGIES = [Strategy.parse(s) for s in ("plain", "suffix:3", "neural:2", "neural:4", "neural:7", "neural:4x3/8")]


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
    machine, tuner = Machine({"neural": 0.8, "suffix": 0.3}), Tuner(STRATEGIES, 256)
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


def test_exploration_is_bounded():
    machine, tuner = Machine({"neural": 0.8, "suffix": 0.3}), Tuner(STRATEGIES, 64)
    for batch in (64, 32, 8, 1):
        play(tuner, machine, batch, 500)
    assert tuner.explored <= 0.021 * tuner.seconds


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


def test_state_survives_as_json():
    machine, tuner = Machine({"neural": 0.8}), Tuner(STRATEGIES, 16)
    play(tuner, machine, 16, 100)
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
