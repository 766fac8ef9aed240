"""How often draft tokens are accepted, by depth, for strategies that differ in depth only (a family).

Two pairs of counts are kept: those of the latest rounds, which fade by the round, and those of all rounds, which halve
whenever new sequences start. The rate at a depth is accepted over reached in the latest rounds plus one draft token at
the rate of all rounds, so new sequences start from what is usual and not from the last ones of the rollout before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

HORIZON = 32  # rounds that count: about what the hardness of a passage, the length of the context and a wait last
ENOUGH = 8  # observations that outweigh chance: durations of a cost, verified draft tokens of a sequence
FADE = 1 - 1 / HORIZON  # weight of a round's counts one round later
PRIOR = 0.5  # acceptance of a family that was never tried


@dataclass
class Acceptance:
    """By depth d: `reached[d]` draft tokens were verified behind accepted ones only, and `accepted[d]` of them were
    accepted too."""

    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    usual_reached: list[float] = field(default_factory=list)
    usual_accepted: list[float] = field(default_factory=list)
    round: int = 0
    """The latest that was observed."""

    def __post_init__(self) -> None:
        self._lengths: dict[bool, list[float]] = {}  # accept length by depth, for a lone sequence and for many

    def observe(self, now: int, depth: int, accepted: Sequence[int]) -> None:
        """In round `now`, drafts of so many tokens had so many of them accepted, by sequence."""
        missing = [0.0] * (depth - len(self.reached))
        for column in (self.reached, self.accepted, self.usual_reached, self.usual_accepted):
            column.extend(missing)
        fade = FADE ** max(0, now - self.round)
        self.reached = [n * fade for n in self.reached]
        self.accepted = [n * fade for n in self.accepted]
        self.round = max(now, self.round)
        ended = [0] * (depth + 1)  # sequences by how many draft tokens were accepted
        for count in accepted:
            ended[count] += 1
        alive = len(accepted)
        for d in range(depth):
            self.reached[d] += alive
            self.usual_reached[d] += alive
            alive -= ended[d]
            self.accepted[d] += alive
            self.usual_accepted[d] += alive
        self._lengths.clear()

    def start_over(self) -> None:
        """Most sequences are new: what was seen of the last ones counts no more than what was seen of any."""
        self.usual_reached = [n / 2 for n in self.usual_reached]
        self.usual_accepted = [n / 2 for n in self.usual_accepted]
        self.reached = [0.0] * len(self.reached)
        self.accepted = [0.0] * len(self.accepted)
        self._lengths.clear()

    @property
    def first_rate(self) -> float:
        """Of the first draft token."""
        return self.accept_length(1) - 1

    def accept_length(self, depth: int, lone: bool = False) -> float:
        """Expected tokens of a round and sequence: 1 + r0 + r0 r1 + … for the rates r, the 1 being the bonus token.

        Among several sequences the rate rises with depth because only the easy ones get there, while a step ends with
        the hard ones: unless the sequence is a `lone` one, no rate counts for more than the one before it. That is the
        accept length of the average sequence, below the average accept length, and it favours shallow drafts where
        sequences differ."""
        known = self._lengths.setdefault(lone, [])
        if depth >= len(known):
            known[:] = self._expected(max(depth, len(self.reached)), lone)
        return known[depth]

    def _expected(self, depth: int, lone: bool) -> list[float]:
        lengths, alive, rate = [1.0], 1.0, PRIOR
        for d in range(depth):
            if d < len(self.reached):
                usual = (self.usual_accepted[d] + rate) / (self.usual_reached[d] + 1)
                found = (self.accepted[d] + usual) / (self.reached[d] + 1)
                rate = found if lone or d == 0 else min(found, rate)
            alive *= rate
            lengths.append(lengths[-1] + alive)
        return lengths
