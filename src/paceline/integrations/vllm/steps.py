"""From vLLM's steps to what the tuner wants to know: what a step did, how long it took, how many draft tokens were
accepted. It reads the fields of vLLM's outputs and imports nothing of vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.draft.decision import Choice
from paceline.integrations.vllm.tuning import DepthTuner, StepPlan, chain


class Scheduled(Protocol):
    """The part of vLLM's `SchedulerOutput` that is read."""

    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_new_reqs: list[Any]


@dataclass
class InFlightStep:
    output: Scheduled
    plan: StepPlan
    started: float
    accepted: dict[str, int]
    gone: set[str]
    """Requests of it that were aborted since."""


class StepMeter:
    def __init__(self, tuner: DepthTuner, always_drafts: bool):
        """`always_drafts`: whether the drafter proposes for every sequence; one that looks for matches may not."""
        self.tuner = tuner
        self.always_drafts = always_drafts
        self._in_flight: deque[InFlightStep] = deque()
        self._last_read = float("-inf")
        self._busy = False  # whether there was more to do after the last step

    def scheduled(self, output: Scheduled, started: float, waiting: bool) -> Choice:
        """A step with sequences is about to run -> what to draft in it."""
        batch = len(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens
        lengths = {len(tokens) for tokens in drafts.values()}
        depth = max(lengths, default=0)
        before = self.tuner.choice
        verified = before if before.strategy.depth == depth else Choice(chain(depth))
        rows = batch + sum(len(tokens) for tokens in drafts.values())
        uniform = not self.always_drafts or not drafts or (len(drafts) == batch and len(lengths) == 1)
        drafted = self.tuner.choose(batch, waiting, bool(output.scheduled_new_reqs))
        plan = StepPlan(batch, verified, drafted, output.total_num_scheduled_tokens > rows, uniform)
        self._in_flight.append(InFlightStep(output, plan, started, {}, set()))
        return drafted

    def read(self, output: Scheduled, sampled: list[list[int]] | None, rows: Mapping[str, int], gone: set[str]) -> None:
        """The tokens that a step has sampled, by row; requests that are `gone` were aborted meanwhile."""
        step = self._step_of(output)
        if step is None:
            return
        step.gone = gone
        if not sampled or step.plan.verified.strategy.plain:
            return
        drafts = output.scheduled_spec_decode_tokens
        for request, scheduled in output.num_scheduled_tokens.items():
            row = rows.get(request)
            if request in gone or row is None or not sampled[row]:
                continue
            if drafts.get(request) or (scheduled == 1 and not self.always_drafts):
                step.accepted[request] = len(sampled[row]) - 1

    def done(self, output: Scheduled, now: float, busy: bool, ended: Mapping[str, int]) -> None:
        """A step's tokens were appended; `ended` has the lengths of completions, by request. Whether there is more to
        do tells whether the time until the next step belongs to it."""
        step = self._step_of(output)
        if step is None:
            return
        self._in_flight.popleft()
        seconds = now - self._begin(step, now)
        self._last_read = now
        self._busy = busy
        self.tuner.observe(step.plan, seconds, step.accepted, list(ended.values()))
        self.tuner.keep(output.num_scheduled_tokens.keys() - ended.keys() - step.gone)

    def _begin(self, step: InFlightStep, now: float) -> float:
        """When a step's time begins: where the last one was read, with what the engine does between two steps, unless
        it was idle or paused in between."""
        pause = step.started - self._last_read
        if pause <= 0 or (self._busy and pause < now - step.started):
            return self._last_read
        return step.started

    def _step_of(self, output: Scheduled) -> InFlightStep | None:
        """Steps are read in the order in which they were scheduled; those that are never read are dropped."""
        if not any(step.output is output for step in self._in_flight):
            return None
        while self._in_flight[0].output is not output:
            self._in_flight.popleft()
        return self._in_flight[0]


def requests_gone(requests: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Of vLLM's requests those that were aborted or have ended."""
    return {name for name in names if (request := requests.get(name)) is None or request.is_finished()}
