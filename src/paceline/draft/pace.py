"""How fast single texts go on when their next tokens are guessed, and how far the slow ones fall behind.

Guesses may hold nearly always in most texts and hardly ever in some. Many tokens are written then, but not those that
are waited for: where a check takes twice as long as a plain round, a text that gets a token from each ends twice as
late. Of many texts the slow ones decide when the last is done, so they are what guessing is judged by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FADE = 31 / 32  # weight of a check one check later
DOUBT = 4.0  # checks that what is known of all texts is worth for each: chance makes texts differ too
ENOUGH = 8.0  # checks of each text, on average, before anything is said
SLOW = 0.1  # of the texts


@dataclass(slots=True)
class Pace:
    """Tokens that the latest checks of a text gave it."""

    tokens: float = 0.0
    checks: float = 0.0

    def add(self, tokens: int) -> None:
        self.tokens = FADE * self.tokens + tokens
        self.checks = FADE * self.checks + 1.0


def evenness(paces: Sequence[Pace]) -> float | None:
    """The pace that all but the slowest tenth reach, over the mean; None if too little was checked."""
    checks = sum(p.checks for p in paces)
    if not paces or checks < ENOUGH * len(paces):
        return None
    known = DOUBT * sum(p.tokens for p in paces) / checks
    each = sorted((p.tokens + known) / (p.checks + DOUBT) for p in paces)
    return each[int(SLOW * len(each))] * len(each) / sum(each)
