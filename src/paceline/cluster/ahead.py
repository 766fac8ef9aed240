"""What workers have written ahead, and how far it pays to write.

The policy changes a little in a step, and the noise of a position is known: so most of what the old policy writes is
what the new one would have written, up to a first token that differs, a flip. Flips come once in so many tokens (the
coupling), and a token is verified in a prefill pass, which is cheaper than decoding it. The n-th token of a draft is
worth its decoding if no flip came before it: it pays while

    (1 - 1 / tokens_per_flip) ^ n > verify_s / decode_s.

All of this is measured, step by step.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.cluster.messages import ActivityKind, RolloutOutcome
    from paceline.core import Request

Coming = Callable[[], list[tuple["Request", float]]]
"""The requests that come after those of a rollout, each with the expected length of its completion."""

FADE = 0.5  # of what earlier steps have measured, with each step
PRIOR_TOKENS = 1000.0  # per flip, as long as little is known
PRIOR_RATIO = 4.0  # of decoding a token to verifying it, as long as nothing is known
TRAINING_SHARE = 0.5  # of the tail, from its beginning, where the drafter began untrained
FREE: tuple[ActivityKind, ...] = ("idle", "training", "ahead")  # what workers do when there is nothing to decode
SHORTEST = 16  # tokens: a draft that cannot become longer is not begun


@dataclass(frozen=True)
class AheadCosts:
    """What is known of writing ahead: sums over the last steps, earlier ones faded."""

    accepted: float = 0.0
    """Tokens that were written ahead and accepted."""
    flips: float = 0.0
    decoded: float = 0.0
    """Tokens that were decoded, and the seconds of it."""
    decode_s: float = 0.0
    prefilled: float = 0.0
    """Tokens that were prefilled or verified, and the seconds of it."""
    prefill_s: float = 0.0
    idle_s: float = math.inf
    """Worker seconds of a step in which there is nothing to decode."""
    tail_s: float = math.inf
    """The most seconds of one worker of that."""

    @property
    def tokens_per_flip(self) -> float:
        return (self.accepted + PRIOR_TOKENS) / (self.flips + 1)

    @property
    def ratio(self) -> float:
        """Seconds of decoding a token over those of verifying it."""
        if not self.decoded or not self.decode_s or not self.prefill_s:
            return PRIOR_RATIO
        return (self.decode_s / self.decoded) / (self.prefill_s / self.prefilled)

    def accepted_of(self, tokens: float) -> float:
        """Expected tokens of a draft that are accepted: the sum of (1 - 1 / tokens_per_flip) ^ n."""
        every = self.tokens_per_flip
        return every * (1 - math.exp(-tokens / every))

    def observe(self, outcomes: Sequence[RolloutOutcome], coupled: bool) -> AheadCosts:
        """After a rollout; `coupled` if what it verified was written by another policy than that of its step."""
        stats = [outcome.stats for outcome in outcomes]
        free = [sum(outcome.seconds(kind) for kind in FREE) for outcome in outcomes]
        kept = FADE if math.isfinite(self.idle_s) else 0.0
        return AheadCosts(
            FADE * self.accepted + (sum(s.ahead_accepted for s in stats) if coupled else 0),
            FADE * self.flips + (sum(s.ahead_flips for s in stats) if coupled else 0),
            FADE * self.decoded + sum(s.decoded_tokens - s.ahead_accepted for s in stats),
            FADE * self.decode_s + sum(s.decode_s for s in stats),
            FADE * self.prefilled + sum(s.prefill_tokens for s in stats),
            FADE * self.prefill_s + sum(s.prefill_s for s in stats),
            (kept and kept * self.idle_s) + (1 - kept) * sum(free),
            (kept and kept * self.tail_s) + (1 - kept) * max(free),
        )


def how_far(costs: AheadCosts) -> int:
    """Tokens up to which a draft pays."""
    if costs.ratio <= 1:
        return 0
    return int(costs.tokens_per_flip * math.log(costs.ratio))


def how_many(costs: AheadCosts, prompt: float) -> float:
    """How many requests are begun at most: so few that in the idle time each becomes twice as long as it takes to pay
    for prefilling its prompt by itself, which its group shares otherwise."""
    if costs.ratio <= 1:
        return 0
    if not costs.decoded or not costs.decode_s:
        return math.inf
    enough = max(SHORTEST, 2 * prompt / (costs.ratio - 1))
    return costs.idle_s * costs.decoded / costs.decode_s / enough


class Ahead:
    """The driver's side of it."""

    def __init__(self, longest: int, untrained: bool = False) -> None:
        """`longest` is the most tokens of prompt and draft that are verified; `untrained` is whether the run begins
        with a drafter that is worth little before it is trained."""
        self._longest = longest
        self.costs = AheadCosts()
        self._training_share = TRAINING_SHARE if untrained else 0.0
        self.written: dict[int, array[int]] = {}
        """By request, from the rollout in which it was written until it is rolled out itself."""
        self._written_in = 0  # the step of the newest

    def choose(self, coming: Sequence[tuple[Request, float]]) -> dict[Request, float]:
        """The requests to be begun, as far as it pays, the longest expected first, each with its expected length."""
        far = how_far(self.costs)
        if far < SHORTEST or not coming:
            return {}
        many = how_many(self.costs, sum(len(r.prompt) for r, _ in coming) / len(coming))
        # A group stays together, whose prompt is prefilled once: sorting keeps the order of equals.
        chosen = sorted(coming, key=lambda one: -one[1])[: int(min(many, len(coming)))]
        short = ((r, min(far, self._longest - len(r.prompt)), expected) for r, expected in chosen)
        return {_cut(r, most): expected for r, most, expected in short if most >= SHORTEST}

    @property
    def training_s(self) -> float:
        """Seconds from the beginning of a tail in which the drafter's training, where it is due, comes first."""
        return self._training_share and self._training_share * self.costs.tail_s

    def known(self, requests: Sequence[Request]) -> dict[int, array[int]]:
        """What was written ahead of these."""
        return {r.id: self.written[r.id] for r in requests if r.id in self.written}

    def left(self, requests: Sequence[Request], expected: Mapping[int, float]) -> dict[int, float]:
        """The expected work of requests, in decoded tokens, of which `expected` is the expected length."""
        return {r.id: self._left(r, expected[r.id]) for r in requests}

    def _left(self, request: Request, expected: float) -> float:
        written = len(self.written.get(request.id, ()))
        if not written:
            return expected
        ended = written < request.sampling.max_tokens and self.written[request.id][-1] in request.sampling.stop_set
        # One that goes on is likely to do so about as long again.
        length = written if ended else min(max(expected, 2.0 * written), request.sampling.max_tokens)
        verifying = (len(request.prompt) + written) / max(1.0, self.costs.ratio)
        return max(1.0, length - self.costs.accepted_of(written)) + verifying

    def take(self, step: int, requests: Sequence[Request], outcomes: Sequence[RolloutOutcome]) -> None:
        """A rollout of these requests is over."""
        self.costs = self.costs.observe(outcomes, coupled=self._written_in < step)
        for request in requests:
            self.written.pop(request.id, None)
        for outcome in outcomes:
            if outcome.ahead:
                self.written |= outcome.ahead
                self._written_in = step


def _cut(request: Request, far: int) -> Request:
    """The same request, to be written no further than so many tokens."""
    s = request.sampling
    most: dict[str, Any] = {"max_tokens": min(s.max_tokens, far), "min_tokens": min(s.min_tokens, far)}
    return replace(request, sampling=replace(s, **most))
