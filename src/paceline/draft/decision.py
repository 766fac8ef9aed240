"""What the engine tells the tuner before and after a round, and what the tuner answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from paceline.draft.strategy import Strategy


@dataclass(frozen=True)
class BatchContext:
    """What the engine knows before a round."""

    batch: int
    """Running sequences."""
    tokens_left: float = inf
    """Mean tokens until the sequences' length limits."""
    catch_up_rows: Mapping[str, int] = field(default_factory=dict)
    """By drafter: rows of the passes that it has to make first because it did not run."""
    slowest: float | None = None
    """Acceptance rate of the slowest sequence over that of all (`draft.stragglers.slowest`); None if not known."""
    served: bool = False
    """Whether requests wait for a slot or keep coming, so that nobody waits for the slowest sequence."""
    most_rows: float = inf
    """Tokens that a pass may verify at most, plain decoding apart: CUDA graphs may end there."""

    def allows(self, strategy: Strategy) -> bool:
        fits = strategy.fits(self.batch) and strategy.pass_rows(self.batch) <= self.most_rows
        return strategy.plain or fits


@dataclass(frozen=True)
class Choice:
    strategy: Strategy
    trial: bool = False
    """Chosen to learn about it, not because it is the best known."""
    first: bool = False
    """Plain decoding after another strategy. It builds what the next plain round reuses, so it is always followed by
    one, and its seconds count only until that one's are known."""


@dataclass(frozen=True)
class RoundOutcome:
    """What a round took and gave."""

    choice: Choice
    batch: int
    seconds: float
    accepted: Sequence[int] | None
    """Accepted draft tokens per sequence; None for plain decoding."""
    captured: bool = False
    """Whether a CUDA graph was captured in it, so that its duration tells nothing about the next one's."""
    catch_up_rows: int = 0
    """Rows of the passes that its drafter made first."""
    ended: Sequence[int] = ()
    """Lengths of the completions that ended with it."""
