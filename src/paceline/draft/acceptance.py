"""How often the guesses of a family of strategies hold, by depth, with old observations fading by the round.

Texts differ: near the end of a rollout two or three are left, and they may be the easiest to guess or the hardest.
What is usual of all texts is kept beside what was seen lately, and is where it starts from with the next ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FADE = 0.96  # weight of an observation one round later
SLOWLY = 0.999  # the same for what is usual
DOUBT = 1.0  # how many observed guesses an old belief is worth
BELIEF = 0.6  # what is assumed of a family that was never tried


@dataclass
class Acceptance:
    """How often guesses of a family hold, by depth: reached[d] texts came to depth d, held[d] of them went past it."""

    reached: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)  # the estimate before the observations that still count
    best: list[float] = field(default_factory=list)  # the highest it has been: what a look may find again
    round: int = 0
    usually_reached: list[float] = field(default_factory=list)  # as `reached`, fading slowly
    usually_held: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.usually_reached:  # as older versions saved it
            self.usually_reached, self.usually_held = list(self.reached), list(self.held)
        self._expected: dict[int, float] = {}  # by depth, until the next observation
        self._hoped: dict[int, float] = {}

    def observe(self, now: int, depth: int, accepted: list[int]) -> None:
        self._fade(now)
        while len(self.reached) < depth:
            self.reached.append(0.0)
            self.held.append(0.0)
            self.rate.append(self.rate[-1] if self.rate else BELIEF)
            self.best.append(BELIEF)
            self.usually_reached.append(0.0)
            self.usually_held.append(0.0)
        ended = [0] * (depth + 1)  # how many texts got this far and no further
        for a in accepted:
            ended[a] += 1
        alive = len(accepted)
        for d in range(depth):
            self.reached[d] += alive
            self.usually_reached[d] += alive
            alive -= ended[d]
            self.held[d] += alive
            self.usually_held[d] += alive
            self.best[d] = max(self.best[d], self.holds(d))
        self._expected, self._hoped = {}, {}

    def start_over(self) -> None:
        """Other texts run now: what was seen of the last ones counts no more than what was seen of any."""
        for d in range(len(self.reached)):
            usual = self.usually_held[d] + DOUBT * self.holds(d)
            self.rate[d] = usual / (self.usually_reached[d] + DOUBT)
            self.reached[d] = self.held[d] = 0.0
        self._expected = {}

    def _fade(self, now: int) -> None:
        """Old observations lose weight; what they said becomes what is believed before new ones come."""
        fade, slowly = FADE ** (now - self.round), SLOWLY ** (now - self.round)
        self.round = now
        for d in range(len(self.reached)):
            self.rate[d] = self.holds(d)
            self.reached[d] *= fade
            self.held[d] *= fade
            self.usually_reached[d] *= slowly
            self.usually_held[d] *= slowly

    def holds(self, d: int) -> float:
        """Probability that a guess at depth d holds, given that those above it did."""
        if d >= len(self.reached):
            return self.holds(len(self.reached) - 1) if self.reached else BELIEF
        # The belief counts little beside observations, but its weight never fades to nothing.
        return (self.held[d] + DOUBT * self.rate[d]) / (self.reached[d] + DOUBT)

    def tokens(self, depth: int) -> float:
        """Expected tokens of a round: the guesses that hold, and one that the policy writes itself."""
        if depth not in self._expected:
            self._expected[depth] = _tokens([self.holds(d) for d in range(depth)])
        return self._expected[depth]

    def hope(self, depth: int) -> float:
        """Tokens of a round if guesses held as they did in their best time."""
        if depth not in self._hoped:
            known = self.best[:depth]
            self._hoped[depth] = _tokens(known + [known[-1] if known else BELIEF] * (depth - len(known)))
        return self._hoped[depth]


def _tokens(holds: list[float]) -> float:
    total = alive = 1.0
    for probability in holds:
        alive *= probability
        total += alive
    return total
