"""How fast single texts go on when their next tokens are guessed, and how far apart that drives them.

Guesses may hold nearly always in most texts and hardly ever in some. Many tokens are written then, but not those that
are waited for: where a check takes twice as long as a plain round, a text that gets a token from each ends twice as
late. What a round of guesses is worth for texts that end together is told by when the last of them ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

FADE = 31 / 32  # weight of a check one check later
ENOUGH = 4.0  # checks of each text, on average, before anything is said


@dataclass(slots=True)
class Pace:
    """Tokens that the latest checks of a text gave it."""

    tokens: float = 0.0
    squares: float = 0.0
    checks: float = 0.0

    def add(self, tokens: int) -> None:
        self.tokens = FADE * self.tokens + tokens
        self.squares = FADE * self.squares + tokens * tokens
        self.checks = FADE * self.checks + 1.0


def relative(paces: Sequence[Pace]) -> list[float] | None:
    """The pace of each text over the mean, slowest first; None if too little was checked. Chance makes texts differ,
    too: each is moved towards the mean by the share of their differences that the scatter within texts explains."""
    checks, known = sum(p.checks for p in paces), [p for p in paces if p.checks]
    if not known or checks < ENOUGH * len(paces):
        return None
    each = [p.tokens / p.checks for p in known]
    mean = sum(each) / len(each)
    between = sum((m - mean) ** 2 for m in each) / len(each)
    within = sum(p.squares - p.tokens * m for p, m in zip(known, each, strict=True)) / max(1.0, checks - len(known))
    real = max(0.0, 1 - within * len(known) / checks / between) if between else 0.0
    return sorted(1 + real * (m / mean - 1) for m in each)


def evenness(paces: Sequence[float], share: Mapping[int, float]) -> float:
    """What a round that moves texts on by `paces`, slowest first and 1 on average, is worth of one that moves all of
    them on by 1, if all have as much left to write. Tokens by which some get ahead save only what it takes less to
    write them for the others alone: `share`, by how many these are at most, of what a plain round of all takes."""
    worth = before = paces[0]
    for behind in sorted(share):
        if behind >= len(paces):
            break
        worth += (paces[behind] - before) * (1 - share[behind])
        before = paces[behind]
    return worth


def together(lengths: Sequence[int]) -> float:
    """How much texts end at the same time, from 0 to 1: half of them are at least so long, beside the longest."""
    return median(lengths) / max(lengths)
