"""A simulated machine, whose costs and acceptance are known, and a tuner that plays on it."""

from __future__ import annotations

import random

from paceline.draft.decision import BatchContext, Choice, RoundOutcome
from paceline.draft.strategy import Strategy
from paceline.draft.tuner import Tuner

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
