"""Which strategy a round should use: the one with the most tokens per second, from measured costs and acceptance.

A token takes a sequence c / m seconds: the cost c of a round at this batch size (`draft.costs`), with the share of the
passes in which the drafter has to catch up, over the expected accept length m (`draft.acceptance`); and more where the
slowest sequence is waited for (`draft.stragglers`). A drafted strategy runs if it is faster than plain decoding by a
margin. Trials of others take at most the share `explore` of the time, and each drafter's trials wait in proportion to
what the last one lost.

Under known noise a decision may depend on anything, the draft at hand included: whatever is verified, the same tokens
are written. Today it depends on past rounds and on the batch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from paceline.draft.acceptance import HORIZON, Acceptance
from paceline.draft.costs import CostTable
from paceline.draft.decision import BatchContext, Choice, RoundOutcome
from paceline.draft.ladder import batch_ladder, bucket
from paceline.draft.stragglers import Stragglers
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.tuner_state import renamed

MARGIN = 0.85  # a drafted strategy's speed is multiplied by this: sequences drift apart and the slowest is waited for
TRIAL_LOSS = 1 / 8  # of `explore`: the share of the time that the trials of one drafter may lose


class Tuner:
    def __init__(self, strategies: list[Strategy], max_batch: int, explore: float = 0.02, margin: float | None = None):
        """`margin` instead of MARGIN, for an engine in which nobody waits for the slowest sequence."""
        self.strategies = [PLAIN, *(s for s in strategies if not s.plain)]
        self.explore = explore
        self.margin = margin
        self.round = 0
        self.total_s = 0.0
        self.explored_s = 0.0
        self.stragglers = Stragglers()
        self._ladder = batch_ladder(max_batch)
        self._costs = CostTable(self.strategies)
        self._acceptance = {s.family: Acceptance() for s in self.strategies}
        self._trial_due: dict[str, float] = {}  # by drafter or family: the `total_s` from which on it may have one
        self._batch = 0  # of the last round
        self._best = PLAIN  # of the last decision
        self._last = Choice(PLAIN)

    def choose(self, context: BatchContext) -> Choice:
        """The strategy of the next round. The outcomes of earlier rounds may be observed later."""
        self.round += 1
        if context.batch > 2 * self._batch:  # more than half of the sequences are new
            self.stragglers.start_over()
            for acceptance in self._acceptance.values():
                acceptance.start_over()
        self.stragglers.running(context.batch, self._batch, context.served)
        self._batch = context.batch
        size = bucket(self._ladder, context.batch)
        if context.slowest is not None and not self._last.strategy.plain:
            self.stragglers.see(size, context.slowest)
        if self._last.first:
            self._last = replace(self._last, first=False)
        else:
            choice = self._decide(size, context)
            self._last = replace(choice, first=choice.strategy.plain and not self._last.strategy.plain)
        return self._last

    def _decide(self, size: int, context: BatchContext) -> Choice:
        if len(self.strategies) == 1 or size not in self._costs.plain:
            return Choice(PLAIN)
        seconds = {s: self._token_s(size, s, context) for s in self.strategies if context.allows(s)}
        margin = MARGIN if self.margin is None else self.margin
        best = min(seconds, key=lambda s: seconds[s] if s.plain else seconds[s] / margin)
        if best.drafter != self._best.drafter:  # a drafter that has become good: all that it can do may be tried
            self._allow_trials(best.drafter)
        self._best = best
        tried = self._trial(size, [s for s in seconds if s != best])
        return Choice(best) if tried is None else Choice(tried, trial=True)

    def _token_s(self, size: int, strategy: Strategy, context: BatchContext) -> float:
        """Expected seconds per token and sequence."""
        seconds = self._costs.round_s(size, strategy)
        if strategy.plain:
            return seconds
        alone = context.batch == 1
        acceptance = self._acceptance[strategy.family]
        tokens = acceptance.accept_length(strategy.depth, alone)
        rounds = max(1.0, min(HORIZON, context.tokens_left / tokens))
        rows = context.catch_up_rows.get(strategy.drafter, 0)
        seconds += self._costs.catch_up_s(size, strategy.drafter, rows) / rounds
        if alone or context.served:
            return seconds / tokens
        waited_for = self.stragglers.waited_for(size, acceptance.first_rate, strategy.depth, tokens)
        return seconds / tokens + waited_for * self._costs.alone_s(size)

    def _trial(self, size: int, others: list[Strategy]) -> Strategy | None:
        """Of the trials that are due the one that has waited longest: of a drafter that is not in use with its cheapest
        strategy, of a family of the one in use with its deepest, which tells of all depths. The first one of all, and
        since a drafter has changed, is due at once."""
        if not self.explore:
            return None
        until = self.total_s if self.explored_s < self.explore * self.total_s else 0.0
        due = {s: self._trial_due.get(self._trial_of(s), 0.0) for s in others}
        ready = (s for s, since in due.items() if since <= until)
        in_use = self._best.drafter
        tried = min(
            ready,
            key=lambda s: (due[s], -s.depth if s.drafter == in_use else self._costs.round_s(size, s)),
            default=None,
        )
        if tried is not None:
            self._trial_due[self._trial_of(tried)] = self.total_s + HORIZON * self._costs.round_s(size, self._best)
        return tried

    def _trial_of(self, strategy: Strategy) -> str:
        """What is tried with it: its family, or its drafter if that is not in use, of which one family tells enough."""
        return strategy.family if strategy.drafter == self._best.drafter else strategy.drafter

    def _allow_trials(self, drafter: str) -> None:
        families = {s.family for s in self.strategies if s.drafter == drafter}
        self._trial_due |= dict.fromkeys(families | {drafter}, self.total_s)

    def observe(self, outcome: RoundOutcome) -> None:
        """Rounds may have been chosen by somebody else; strategies that are not the tuner's own are ignored."""
        self.stragglers.observe(outcome.accepted, outcome.ended)
        strategy = outcome.choice.strategy
        if strategy not in self._costs.costs:
            return
        self.total_s += outcome.seconds
        if outcome.accepted is not None:
            self._acceptance[strategy.family].observe(self.round, strategy.depth, outcome.accepted)
        wait_s = HORIZON * outcome.seconds
        if outcome.choice.trial:
            self.explored_s += outcome.seconds
            wait_s = max(wait_s, self._lost_s(outcome) / (TRIAL_LOSS * self.explore))
        self._trial_due[self._trial_of(strategy)] = self.total_s + wait_s
        if not outcome.captured:
            size = bucket(self._ladder, outcome.batch)
            self._costs.observe(size, outcome.choice, outcome.seconds, outcome.catch_up_rows, self.round)

    def _lost_s(self, trial: RoundOutcome) -> float:
        """Its seconds, less what its tokens would have taken plainly. Where sequences end together, accepted draft
        tokens gain nothing that is sure."""
        accepted = fmean(trial.accepted) if trial.accepted else 0.0
        tokens = 1 + (1 - self.stragglers.together) * accepted
        size = bucket(self._ladder, trial.batch)
        if size not in self._costs.plain:  # sequences have ended since it was chosen
            return 0.0
        return trial.seconds - tokens * self._costs.round_s(size, PLAIN)

    def renew(self) -> None:
        """A drafter has changed: every trial may come at once, whatever those before have taken."""
        self._trial_due.clear()

    def state(self) -> dict[str, Any]:
        """All that it knows, as JSON."""
        return {
            "round": self.round,
            "seconds": self.total_s,
            "explored": self.explored_s,
            **self._costs.state(),
            "acceptance": {family: asdict(a) for family, a in self._acceptance.items()},
            "stragglers": self.stragglers.state(),
            "trial_due": self._trial_due,
            "best": str(self._best),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what an earlier tuner knew about strategies and batch sizes that still exist."""
        self.round = state["round"]
        self.total_s = state["seconds"]
        self.explored_s = state["explored"]
        self._costs.restore(state, self._ladder)
        for family, entry in state["acceptance"].items():
            if family in self._acceptance:
                self._acceptance[family] = Acceptance(**renamed(entry))
        self.stragglers.restore(state.get("stragglers", {}), self._ladder)
        self._trial_due = dict(state.get("trial_due", {}))
        self._best = Strategy.parse(state.get("best", "plain"))
