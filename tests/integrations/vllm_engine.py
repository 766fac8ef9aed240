"""A simulated vLLM engine: what its scheduler and its model runner pass to each other, with a clock of its own. Draft
tokens are made in one step and verified in the next; with `overlap` a step is scheduled before the last one is read."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.integrations.vllm.steps import StepMeter, requests_gone


@dataclass
class Output:
    """The fields of vLLM's SchedulerOutput that are read."""

    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_new_reqs: list[str] = field(default_factory=list)


@dataclass
class EngineRequest:
    left: int
    """Tokens to write."""
    drafted: int = 0
    """Draft tokens that the last step has made."""
    written: int = 0
    prompt: int = 8
    """Tokens of the prompt that are not read yet."""
    rate: float | None = None
    """Share of its draft tokens that are accepted, if it is another one than the machine's."""

    def is_finished(self) -> bool:
        return self.left <= 0


@dataclass
class Machine:
    """A pass costs a floor until too many tokens run at once; the drafter reads them in any case, and each further
    pass of it costs a share of the floor."""

    knee: int
    rate: float
    draft_s: float = 0.06e-3
    floor_s: float = 1e-3

    def seconds(self, rows: int, drafted: int) -> float:
        return self.floor_s * max(1.0, rows / self.knee) + self.draft_s * max(1, drafted)

    def speed(self, batch: int, depth: int) -> float:
        """Tokens per second and sequence at one depth."""
        return sum(self.rate**d for d in range(depth + 1)) / self.seconds(batch * (1 + depth), depth)


class SimulatedEngine:
    def __init__(self, meter: StepMeter | None, machine: Machine, slots: int, overlap: bool, depth: int = 0):
        """Without a meter every step drafts `depth` tokens."""
        self.meter = meter
        self.machine = machine
        self.slots = slots
        self.overlap = overlap
        self.depth = depth
        self.now = 100.0
        self.dice = random.Random(0)
        self.requests: dict[str, EngineRequest] = {}
        self.waiting: deque[str] = deque()
        self.running: list[str] = []
        self.verified: dict[int, Counter[int]] = {}
        """By batch size: steps by depth."""
        self.rows = 0
        """Most tokens of a step without prompts."""
        self._free_at = 0.0  # when the device has done all that it was given

    def add(self, name: str, tokens: int, prompt: int = 8, rate: float | None = None) -> None:
        self.requests[name] = EngineRequest(tokens, prompt=prompt, rate=rate)
        self.waiting.append(name)

    def run(self, until: Callable[[], bool] = lambda: False) -> float:
        """Seconds until all is written."""
        started = self.now
        in_flight: deque[tuple[Output, float]] = deque()
        while not until() and (self.running or self.waiting or in_flight):
            if len(in_flight) <= self.overlap and (self.running or self.waiting):
                in_flight.append(self._launch())
            if len(in_flight) > self.overlap or not (self.running or self.waiting):
                self._read(*in_flight.popleft())
        return self.now - started

    def _launch(self) -> tuple[Output, float]:
        started = self.now
        new = []
        while self.waiting and len(self.running) < self.slots:
            new.append(self.waiting.popleft())
            self.running.append(new[-1])
        scheduled, drafts = {}, {}
        for name in self.running:
            request = self.requests[name]
            if request.drafted and not request.prompt:
                drafts[name] = [-1] * request.drafted
            scheduled[name] = request.prompt or 1 + request.drafted
        output = Output(scheduled, sum(scheduled.values()), drafts, new)
        depth = self.depth
        if self.meter is not None:
            depth = self.meter.scheduled(output, started, bool(self.waiting)).strategy.depth
        verified = max((len(d) for d in drafts.values()), default=0)
        self.verified.setdefault(len(scheduled), Counter())[verified] += 1
        if not new:
            self.rows = max(self.rows, output.total_num_scheduled_tokens)
        for name in self.running:
            self.requests[name].prompt = 0
            self.requests[name].drafted = depth
        self._free_at = max(self._free_at, self.now) + self.machine.seconds(output.total_num_scheduled_tokens, depth)
        return output, self._free_at

    def _read(self, output: Output, done_at: float) -> None:
        self.now = max(self.now, done_at)
        sampled = []
        before: dict[str, Any] = {}
        for name in output.num_scheduled_tokens:
            if name in self.requests:
                before[name] = self.requests[name]
            accepted = 0
            rate = before[name].rate if name in before else None
            for _ in output.scheduled_spec_decode_tokens.get(name, ()):
                if self.dice.random() >= (self.machine.rate if rate is None else rate):
                    break
                accepted += 1
            sampled.append([7] * (1 + accepted))
        rows = {name: row for row, name in enumerate(output.num_scheduled_tokens)}
        if self.meter is not None:
            self.meter.read(output, sampled, rows, requests_gone(before, output.num_scheduled_tokens))
        ended = {}
        for name, request in before.items():
            if request.is_finished():
                continue
            count = min(request.left, len(sampled[rows[name]]))
            request.left -= count
            request.written += count
            if request.is_finished():
                ended[name] = request.written
                self.running.remove(name)
        if self.meter is not None:
            self.meter.done(output, self.now, bool(self.running), ended)
