"""How long a step's rollout would take with a drafter of another accept length, from the rounds that were made.

Each round gives its sequences some tokens at a batch size. What that many tokens would take with another drafter is the
least that plain decoding or any chain of draft tokens would take for them at that size: the measured seconds of its
rounds over the accept length that it would have. Costs are the tuner's own (`draft.costs`), measured where there were
such rounds and guessed elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from paceline.draft.costs import CostTable
from paceline.draft.decision import Choice
from paceline.draft.ladder import batch_ladder, bucket
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.tuner import MARGIN

if TYPE_CHECKING:
    from paceline.rollout.stats import RoundRecord

NEURAL = "neural"
BISECTIONS = 30


class RolloutTime:
    def __init__(self, strategies: Sequence[Strategy], max_batch: int, depth: int):
        """Accept lengths are those of chains of `depth` draft tokens."""
        self.depth = depth
        self._costs = CostTable([PLAIN, *(s for s in strategies if not s.plain)])
        self._chains = [s for s in strategies if s.drafter == NEURAL and s.chain]
        self._ladder = batch_ladder(max_batch)
        self._round = 0
        self._tokens: dict[int, float] = {}  # by batch size: tokens of each sequence in the last rollout, per worker
        self._base: dict[int, float] = {}  # by batch size: seconds per token without the drafter

    def observe(self, rollouts: Iterable[Sequence[RoundRecord]], workers: int) -> None:
        """The rounds of all rollouts of a step, by worker and rollout; so many workers made them."""
        tokens: Counter[int] = Counter()
        others: dict[Strategy, list[tuple[int, float]]] = {}  # batch and tokens of each sequence
        for rounds in rollouts:
            before = PLAIN
            for r in rounds:
                if r.strategy == "prefill" or not r.tokens:
                    continue
                strategy = Strategy.parse(r.strategy)
                size = bucket(self._ladder, r.batch)
                each = r.tokens / r.batch
                self._round += 1
                tokens[size] += each  # type: ignore[assignment]
                if strategy in self._costs.costs:
                    choice = Choice(strategy, first=strategy.plain and not before.plain)
                    self._costs.observe(size, choice, r.seconds, 0, self._round)
                    if strategy.drafter not in (NEURAL, PLAIN.drafter):
                        others.setdefault(strategy, []).append((size, each))
                before = strategy
        if not self._costs.plain:
            return
        self._tokens = {size: each / workers for size, each in tokens.items()}
        self._base = {size: self._without_drafter(size, others) for size in self._tokens}

    def _without_drafter(self, size: int, others: dict[Strategy, list[tuple[int, float]]]) -> float:
        """Seconds per token, plainly or with drafts that need no training, whichever is less."""
        seconds = [self._plain_s(size)]
        for strategy, rounds in others.items():
            here = [each for batch, each in rounds if batch == size]
            if here and size in self._costs.costs[strategy]:
                seconds.append(self._costs.round_s(size, strategy) * len(here) / sum(here))
        return min(seconds)

    def _plain_s(self, size: int) -> float:
        """Of a round of plain decoding; where it was never measured, at the nearest size."""
        plain = self._costs.plain
        return plain[min(plain, key=lambda known: (abs(known - size), known))].median

    def seconds(self, accept_length: float) -> float:
        """Of the decoding rounds of a step, for each worker."""
        rate = rate_of(accept_length, self.depth)
        return sum(each * self._token_s(size, rate) for size, each in self._tokens.items())

    def _token_s(self, size: int, rate: float) -> float:
        base = self._base[size]
        if size not in self._costs.plain:
            return base
        drafted = [self._costs.round_s(size, s) / chain_length(rate, s.depth) for s in self._chains if s.fits(size)]
        fastest = min(drafted, default=base)
        return fastest if fastest < MARGIN * base else base


def chain_length(rate: float, depth: int) -> float:
    """Tokens of a round with a chain of `depth` draft tokens, each of which is accepted at this rate."""
    return sum(rate**k for k in range(depth + 1))


def rate_of(accept_length: float, depth: int) -> float:
    """The rate at which draft tokens are accepted that gives chains of `depth` this accept length."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        rate = (low + high) / 2
        low, high = (rate, high) if chain_length(rate, depth) < accept_length else (low, rate)
    return (low + high) / 2
