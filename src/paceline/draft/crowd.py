"""What guessing is worth where many texts run: all of them are waited for, and some are much slower than the others.

It remembers, by batch size, how often guesses held for each text, and whether texts end together. Both are told by
rollouts that are over, until the present one tells more.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.draft.pace import evenness, together

FEW = 32  # texts; of more, some are much slower than the others
MARGIN = 0.8  # guessing lets texts end at different times, which costs later what it does not show now
CLOSE = 0.92  # the same where it is known what the slow ones cost
USUAL = 0.8  # what is assumed that they leave of a lead until it is
FORGET = 0.1  # of what was known about that, with every rollout that does not show it
ENDINGS = 1024  # texts whose lengths tell how they end


class Crowd:
    """The texts that run together, as far as they are told apart."""

    def __init__(self) -> None:
        self._rates: dict[int, Sequence[float]] = {}  # by bucket, as last seen
        self._unseen: Counter[int] = Counter()  # rollouts since then
        self._together = 1.0  # as in the last rollout
        self._lengths: deque[int] = deque(maxlen=ENDINGS)  # of texts that have ended in this one

    def start_over(self) -> None:
        """Other texts run now."""
        self._unseen.update(self._rates.keys())
        if len(self._lengths) > FEW:
            self._together = together(self._lengths)
        self._lengths.clear()

    def ended(self, lengths: Iterable[int]) -> None:
        self._lengths.extend(lengths)

    def see(self, size: int, rates: Sequence[float]) -> None:
        self._rates[size], self._unseen[size] = rates, 0

    def worth(self, size: int, share: Mapping[int, float]) -> Callable[[int], float]:
        """By how deep guesses are: what they are worth of the tokens per second that they promise. Of texts that end
        together most may be nearly done while some, whose guesses never hold, wait for checks that take twice as long
        as plain rounds. `share` is what plain rounds of fewer texts take, over one of all."""
        known, old = self._rates.get(size), 1 - (1 - FORGET) ** self._unseen[size]

        @functools.cache
        def worth(depth: int) -> float:
            even = USUAL if known is None else evenness(known, depth, share) * (1 - old) + USUAL * old
            return self._together * CLOSE * even + (1 - self._together) * MARGIN

        return worth

    def state(self) -> dict[str, Any]:
        """All that it knows, as JSON."""
        seen = sorted(self._rates.items())
        return {
            "together": self._together,
            "rates": [{"batch": n, "unseen": self._unseen[n], "rates": list(rates)} for n, rates in seen],
        }

    def restore(self, state: dict[str, Any], sizes: Sequence[int]) -> None:
        self._together = state["together"]
        for entry in state["rates"]:
            if entry["batch"] in sizes:
                self._rates[entry["batch"]], self._unseen[entry["batch"]] = entry["rates"], entry["unseen"]
