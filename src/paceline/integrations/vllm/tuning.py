"""The depth of speculation for vLLM's next step, off included. Nothing here knows vLLM.

Which depth pays is decided by the tuner of our own engine (`draft.tuner`). What is different here: draft tokens are
made in one step and verified in the next, so a depth is kept for a few steps, of which those are measured that verify
and draft at the same depth; steps take prompts along, which tells nothing of a depth; and the drafter reads every token
even where nothing is drafted, so that "off" has its price, which is measured with it, and catching up has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.draft.acceptance import FADE, HORIZON
from paceline.draft.decision import BatchContext, Choice, RoundOutcome
from paceline.draft.stragglers import slowest
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.tuner import Tuner

KEPT_STEPS = 3  # that a depth is kept for at least: the first one verifies at the depth before, others are measured
KEPT_PLAIN = 2  # the same for decoding without speculation, which every batch size begins with
MIXED_STEPS = 32  # mixed steps in a row after which they are measured too: a busy engine may have no others


@dataclass(frozen=True)
class Envelope:
    """Depths and batch sizes that the engine is prepared for."""

    depths: tuple[int, ...]
    max_batch: int
    most_rows: float
    """Tokens of a pass up to which there are CUDA graphs; infinite without any."""


@dataclass(frozen=True)
class StepPlan:
    """What a step does, known when it is scheduled."""

    batch: int
    """Sequences of it."""
    verified: Choice
    """Whose draft tokens it verifies."""
    drafted: Choice
    """What its drafter is asked for."""
    prompts: bool
    """Whether some of its tokens are prompts."""
    uniform: bool = True
    """Whether it verifies as many draft tokens of every sequence."""


class DepthTuner:
    def __init__(self, envelope: Envelope, explore: float, margin: float):
        self.envelope = envelope
        strategies = [chain(depth) for depth in envelope.depths if depth]
        self.tuner = Tuner([PLAIN, *strategies], envelope.max_batch, explore, margin)
        self.choice = Choice(PLAIN)
        """Of the last step."""
        self.steps: Counter[int] = Counter()
        """By verified depth."""
        self.seconds = 0.0
        self.drafts = 0
        self.accepted = 0
        self._kept = 0  # steps for which the choice stays
        self._since_arrival = HORIZON  # steps since requests arrived while others ran
        self._arriving = False  # in the last step
        self._running = False  # after the last step that was read
        self._mixed_in_a_row = 0  # steps
        self._requests = RequestAcceptance()

    def choose(self, batch: int, waiting: bool, arrived: bool) -> Choice:
        """For the draft of a step of so many sequences. `waiting` tells whether requests wait for a slot, `arrived`
        whether some are new in this step."""
        # Where requests keep coming, nobody waits for the slowest one. A batch that an idle engine was given, which it
        # may take in over some steps, ends with it.
        joined = arrived and self._running and not self._arriving
        self._arriving = arrived
        self._since_arrival = 0 if joined else self._since_arrival + 1
        served = waiting or self._since_arrival < HORIZON
        ratio = None if served else self._requests.slowest()
        context = BatchContext(batch, slowest=ratio, served=served, most_rows=self.envelope.most_rows)
        if self._kept > 0 and context.allows(self.choice.strategy):
            self._kept -= 1
            return self.choice
        choice = self.tuner.choose(context)
        if choice.strategy != self.choice.strategy:
            self._kept = (KEPT_PLAIN if choice.strategy.plain else KEPT_STEPS) - 1
        self.choice = choice
        return choice

    def observe(self, plan: StepPlan, seconds: float, accepted: Mapping[str, int], ended: Sequence[int]) -> None:
        """A step is done: accepted draft tokens by request, and lengths of the completions that ended."""
        strategy = plan.verified.strategy
        mixed = plan.prompts or not plan.uniform
        self._mixed_in_a_row = self._mixed_in_a_row + 1 if mixed else 0
        measured = strategy == plan.drafted.strategy and (not mixed or self._mixed_in_a_row > MIXED_STEPS)
        told = None if strategy.plain else list(accepted.values())
        self.tuner.observe(RoundOutcome(plan.verified, plan.batch, seconds, told, not measured, ended=ended))
        self._requests.observe(accepted, strategy.depth)
        self.steps[strategy.depth] += 1
        self.seconds += seconds
        self.drafts += len(accepted)
        self.accepted += sum(accepted.values())

    def keep(self, running: Collection[str]) -> None:
        """Forget requests that do not run any more."""
        self._running = bool(running)
        self._requests.keep(running)

    def renew(self) -> None:
        """The drafter has changed."""
        self.tuner.renew()

    @property
    def accept_length(self) -> float:
        """Of sequences that had draft tokens."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    def summary(self) -> dict[str, Any]:
        """For the log and for metrics."""
        return {
            "depth": self.choice.strategy.depth,
            "accept_length": round(self.accept_length, 3),
            "steps_by_depth": {str(depth): count for depth, count in sorted(self.steps.items())},
            "explored": round(self.tuner.explored_s / self.tuner.total_s, 4) if self.tuner.total_s else 0.0,
            "seconds": round(self.seconds, 3),
        }


class RequestAcceptance:
    """Accepted draft tokens of each running request in its latest rounds, as `draft.stragglers` wants them."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}

    def observe(self, accepted: Mapping[str, int], depth: int) -> None:
        for request, count in accepted.items():
            reached, before = self._counts.get(request, (0.0, 0.0))
            self._counts[request] = (FADE * reached + min(count + 1, depth), FADE * before + count)

    def keep(self, running: Collection[str]) -> None:
        if len(self._counts) > len(running):
            self._counts = {request: counts for request, counts in self._counts.items() if request in running}

    def slowest(self) -> float | None:
        if not self._counts:
            return None
        counts = np.array(list(self._counts.values()))
        return slowest(counts[:, 0], counts[:, 1])


def chain(depth: int) -> Strategy:
    """vLLM's own chains of draft tokens; it knows no trees."""
    return Strategy("neural", depth, 1, depth) if depth else PLAIN
