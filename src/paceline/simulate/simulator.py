"""Steps on simulated workers, with one technique after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from paceline.simulate.costs import StepCosts, StepWork
from paceline.simulate.idle import Coupling, gradients_in_tail, write_ahead
from paceline.simulate.rollout import Moving, RolloutSimulation
from paceline.simulate.worker import SimRequest

VERIFIED_AT_ONCE = 512  # tokens of a sequence that were written ahead


@dataclass(frozen=True)
class Techniques:
    speculation: bool = True
    """Rounds as the run's tuner decoded; otherwise plain decoding."""
    move: bool = False
    """Running sequences move to workers that have run dry."""
    gradients: bool = False
    """Idle workers compute gradients of finished groups."""
    ahead: bool = False
    """Idle workers begin the next step's requests."""


STAGES: dict[str, Techniques] = {
    "plain decoding": Techniques(speculation=False),
    "speculation": Techniques(),
    "+ running requests move": Techniques(move=True),
    "+ gradients in the tail": Techniques(move=True, gradients=True),
    "+ writing ahead": Techniques(move=True, gradients=True, ahead=True),
}
"""Each has what those before it have."""


@dataclass(frozen=True)
class SimStep:
    """Of one step, or the mean of several. Seconds."""

    step_s: float
    rollout_s: float
    dry: float
    """Share of the workers' time in which they have nothing to decode while others do."""
    idle: float
    """The part of it that is left after gradients and writing ahead; the drafter can be trained in it."""
    kept: float = 0.0
    """Share of the tokens that were written ahead of this step and are kept."""


@dataclass(frozen=True)
class _Ahead:
    """What was written of a step's requests before it began."""

    written: Sequence[float]
    kept: Sequence[float]

    def verified(self, request: int) -> float:
        """Tokens that are verified, in passes over so many, until one is not kept."""
        return min(self.written[request], self.kept[request] + VERIFIED_AT_ONCE)


class Simulator:
    def __init__(self, costs: StepCosts, slots: int, max_tokens: int, coupling: Coupling):
        """`slots` sequences of a worker decode together at most."""
        self.costs = costs
        self.max_tokens = max_tokens
        self.slots = slots
        self.coupling = coupling

    def run(self, steps: Sequence[StepWork], workers: int, techniques: Techniques) -> SimStep:
        """The mean step."""
        made: list[SimStep] = []
        ahead: _Ahead | None = None
        for number, work in enumerate(steps):
            following = steps[(number + 1) % len(steps)]
            step, ahead = self._step(number, work, following, workers, techniques, ahead)
            made.append(step)
        return SimStep(*(fmean(getattr(step, name) for step in made) for name in SimStep.__dataclass_fields__))

    def _step(
        self,
        number: int,
        work: StepWork,
        following: StepWork,
        workers: int,
        techniques: Techniques,
        ahead: _Ahead | None,
    ) -> tuple[SimStep, _Ahead | None]:
        costs = self.costs
        curve = costs.adaptive if techniques.speculation else costs.plain
        rollout = RolloutSimulation(
            self._requests(work, ahead),
            work.group,
            workers,
            curve,
            self.slots,
            Moving(costs.verify_token_s, work.prompt_tokens, self.max_tokens) if techniques.move else None,
        ).run()
        idle_s = rollout.dry_s
        gradients_s = gradients_in_tail(rollout, work, costs.gradient_token_s) if techniques.gradients else 0.0
        idle_s -= gradients_s
        next_ahead = None
        ahead_s = 0.0
        if techniques.ahead and workers > 1:
            next_ahead, ahead_s = self._write_ahead(number + 1, following, idle_s, workers)
        update_s = costs.update_s + (work.update_tokens * costs.gradient_token_s - gradients_s) / workers
        rollout_s = costs.rollout_s + rollout.seconds
        step_s = rollout_s + update_s + costs.after_s
        total = workers * step_s
        kept = sum(ahead.kept) / sum(ahead.written) if ahead and sum(ahead.written) else 0.0
        return SimStep(step_s, rollout_s, rollout.dry_s / total, (idle_s - ahead_s) / total, kept), next_ahead

    def _requests(self, work: StepWork, ahead: _Ahead | None) -> list[SimRequest]:
        requests = [SimRequest(i, float(n), self.costs.prefill_s) for i, n in enumerate(work.lengths)]
        if ahead is None:
            return requests
        return [
            replace(
                request,
                tokens=max(1.0, request.tokens - ahead.kept[request.id]),
                first_s=request.first_s + self.costs.verify_token_s * ahead.verified(request.id),
            )
            for request in requests
        ]

    def _write_ahead(self, step: int, work: StepWork, idle_s: float, workers: int) -> tuple[_Ahead, float]:
        """The idle time is spread over all workers but one, which decodes the last request -> what they write in it,
        and the worker seconds that it takes."""
        idle_workers = workers - 1
        curve = self.costs.adaptive
        written, spent_s = write_ahead(idle_s / idle_workers, idle_workers, work.lengths, curve, self.slots)
        return _Ahead(written, [self.coupling.kept(tokens, i, step) for i, tokens in enumerate(written)]), spent_s
