"""What decides about publishing a drafter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Evaluation(NamedTuple):
    """Expected tokens per check of two drafters on the same answers."""

    before: float
    after: float
    tokens: int
    """Places at which they were judged; 0 if there was no answer to judge them by."""

    @property
    def better(self) -> bool:
        """Not worse, to be exact. What is not a number is never better."""
        return self.tokens > 0 and self.after >= self.before


def overall(verdicts: Iterable[Evaluation]) -> Evaluation:
    """As if all answers that workers have kept aside had been judged by one of them."""
    known = [v for v in verdicts if v.tokens]
    tokens = sum(v.tokens for v in known)
    if not tokens:
        return Evaluation(0.0, 0.0, 0)
    before, after = (sum(v[i] * v.tokens for v in known) / tokens for i in range(2))
    return Evaluation(before, after, tokens)
