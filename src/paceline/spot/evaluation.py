"""What decides about publishing a drafter."""

from __future__ import annotations

from typing import NamedTuple


class Evaluation(NamedTuple):
    """Expected accept length of two drafters on the same held-out answers."""

    before: float
    """Of the published drafter."""
    after: float
    """Of the candidate."""
    tokens: int
    """Positions at which both were evaluated; 0 if there was no held-out answer."""

    @property
    def better(self) -> bool:
        """Not worse, to be exact. What is not a number is never better."""
        return self.tokens > 0 and self.after >= self.before

    def sums(self) -> list[float]:
        """Sums over positions, so that those of several workers can be added."""
        return [self.before * self.tokens, self.after * self.tokens, float(self.tokens)]

    @classmethod
    def from_sums(cls, sums: list[float]) -> Evaluation:
        """As if one worker had evaluated all held-out answers."""
        before, after, tokens = sums
        return cls(before / max(tokens, 1), after / max(tokens, 1), int(tokens))
