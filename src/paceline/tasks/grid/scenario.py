"""A state of a grid, and what single outages lead to there: everything in it is a function of a few numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from paceline.core import mix_seed
from paceline.tasks.grid.network import Flow, network

LOW = 0.8
HIGH = 1.1
"""Of all loads together, from the base case."""
SPREAD = 0.15  # by which each load differs from that, at most
TEST_SHARE = 0.25  # of the lines that may be out already: only test prompts have those
FLOWS_KEPT = 4096  # outages whose flow is kept: a group of completions asks for the same


@dataclass(frozen=True)
class Scenario:
    case: int
    level: float
    """Of the load."""
    seed: int
    """Of the differences between loads."""
    out: str
    """A line that is out already; empty for none."""
    candidates: tuple[str, ...]
    """Lines that may go next."""

    def columns(self) -> dict[str, Any]:
        return {"case": self.case, "level": self.level, "load_seed": self.seed, "out": self.out,
                "candidates": list(self.candidates)}  # fmt: skip

    @classmethod
    def of(cls, columns: dict[str, Any]) -> Scenario:
        c = columns
        return cls(c["case"], c["level"], c["load_seed"], c["out"], tuple(c["candidates"]))

    def base(self) -> dict[str, float]:
        """Loadings before any of the candidates goes."""
        return network(self.case).loadings(self._scale(), self._already)

    def outage(self, name: str) -> Flow:
        return _flow(self.case, self.level, self.seed, (*self._already, name))

    def truth(self) -> dict[str, float]:
        """Severity in percent, by candidate."""
        return {name: self.outage(name).severity for name in self.candidates}

    @property
    def _already(self) -> tuple[str, ...]:
        return (self.out,) if self.out else ()

    def _scale(self) -> Any:
        return scale_of(self.case, self.level, self.seed)


def scale_of(case: int, level: float, seed: int) -> Any:
    """What each load is multiplied by."""
    dice = np.random.default_rng(seed)
    return level * (1 + SPREAD * (2 * dice.random(network(case).loads) - 1))


@lru_cache(FLOWS_KEPT)
def _flow(case: int, level: float, seed: int, out: tuple[str, ...]) -> Flow:
    return network(case).flow(scale_of(case, level, seed), out)


def topologies(case: int, split: str) -> list[str]:
    """Lines that may be out already; the test part has its own, by hash, and the train part the whole grid too."""
    lines = network(case).outages()
    test = [name for name in lines if mix_seed("grid", case, name) % 1000 < 1000 * TEST_SHARE]
    return test if split == "test" else ["", *(name for name in lines if name not in test)]


def draw(case: int, split: str, count: int, seed: int) -> Scenario:
    """Half of the candidates are lines that carry much, because those that do not seldom matter."""
    grid = network(case)
    dice = random.Random(seed)
    while True:
        out = dice.choice(topologies(case, split))
        state = Scenario(case, round(dice.uniform(LOW, HIGH), 2), dice.randrange(2**31), out, ())
        already = (out,) if out else ()
        if grid.flow(state._scale(), already).breaks:  # a grid that is beyond its limits already is no place to ask
            continue
        loadings = state.base()
        able = [n for n in grid.outages() if n != out and grid.connected((*already, n))]
        if len(able) < count:
            continue
        dice.shuffle(able)
        heavy = sorted(able, key=lambda name: -loadings[name])[: 2 * count]
        dice.shuffle(heavy)
        some = heavy[: count // 2]
        some += [name for name in able if name not in some][: count - len(some)]
        order = {name: i for i, name in enumerate(grid.branches)}
        return Scenario(case, state.level, state.seed, out, tuple(sorted(some, key=order.__getitem__)))
