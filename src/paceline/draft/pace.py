"""How often guesses hold for single texts, and how far apart that drives them.

Guesses may hold nearly always in most texts and hardly ever in some. Many tokens are written then, but not those that
are waited for: where a check takes twice as long as a plain round, a text that gets a token from each ends twice as
late. What a round of guesses is worth for texts that end together is told by when the last of them ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

FADE = 31 / 32  # weight of a check one check later
ENOUGH = 8.0  # checks of each text, on average, before anything is said


@dataclass(slots=True)
class Pace:
    """What the latest checks of a text found: guesses that were reached, and those of them that held."""

    reached: float = 0.0
    held: float = 0.0
    checks: float = 0.0

    def add(self, held: int, depth: int) -> None:
        self.reached = FADE * self.reached + min(depth, held + 1)
        self.held = FADE * self.held + held
        self.checks = FADE * self.checks + 1.0


def rates(paces: Sequence[Pace]) -> list[float] | None:
    """How often guesses hold for each text, the most seldom first; None if too little was checked. Some of the
    differences are chance, but by chance texts will get apart in the next checks, too."""
    known = [p.held / p.reached for p in paces if p.checks]
    if not known or sum(p.checks for p in paces) < ENOUGH * len(paces):
        return None
    return sorted(known)


def evenness(each: Sequence[float], depth: int, share: Mapping[int, float]) -> float:
    """Guesses hold so often for each text (`rates`). What a round of them `depth` deep is worth of one that would give
    every text the mean of what it gives these, if all have as much left to write. Tokens by which some get ahead save
    only what it takes less to write them for the others alone: `share`, by how many these are at most, of what a plain
    round of all takes."""
    tokens = np.cumsum(np.asarray(each)[:, None] ** np.arange(depth + 1), 1)[:, -1]
    worth = before = float(tokens[0])
    for behind in sorted(n for n in share if n < len(tokens)):
        worth += (float(tokens[behind]) - before) * (1 - share[behind])
        before = float(tokens[behind])
    return worth / float(tokens.mean())


def together(lengths: Sequence[int]) -> float:
    """How much texts end at the same time, from 0 to 1: half of them are at least so long, beside the longest."""
    return median(lengths) / max(lengths)
