"""A rollout on simulated workers. Who decodes what is decided by the coordinator of real ones
(`cluster.coordinator`)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.cluster.coordinator import Assign, Done, Joined, Load, Order, Release, Released, RolloutState, decide
from paceline.simulate.costs import BatchCurve
from paceline.simulate.worker import SimRequest, SimWorker

Span = tuple[float, float]


@dataclass
class SimRollout:
    """What came of it; seconds since it began."""

    seconds: float = 0.0
    ended: dict[int, float] = field(default_factory=dict)
    """When each request ended."""
    dry: list[Span] = field(default_factory=list)
    """Stretches in which a worker had nothing to decode, of all workers."""
    moved: int = 0
    """Sequences that another worker went on with."""

    @property
    def dry_s(self) -> float:
        return sum(end - start for start, end in self.dry)


@dataclass(frozen=True)
class Moving:
    """What moving a running sequence costs, and what is known of how it goes on."""

    token_s: float
    """Of computing a token's keys and values again."""
    prompt_tokens: float
    max_tokens: int

    def cost_s(self, written: float) -> float:
        return (self.prompt_tokens + written) * self.token_s

    def expected_left(self, written: float) -> float:
        """Tokens: a sequence that has run for long is expected to run for as long again, within the limit."""
        return max(0.0, min(written, self.max_tokens - written))


class RolloutSimulation:
    def __init__(
        self,
        requests: Sequence[SimRequest],
        group: int,
        workers: int,
        curve: BatchCurve,
        slots: int,
        moving: Moving | None = None,
    ):
        """With `moving`, running sequences move to workers that have run dry."""
        self.requests = {request.id: request for request in requests}
        self.curve = curve
        self.moving = moving
        self.workers = [SimWorker(self.requests, curve, slots) for _ in range(workers)]
        self.state = RolloutState(workers, dict.fromkeys(self.requests, 1.0), group)
        self.result = SimRollout()
        self._dry_since: list[float | None] = [0.0] * workers
        self._ends: list[tuple[float, int, int]] = []  # a heap of (when a sequence ends, worker, its changes by then)
        self._changes = [0] * workers  # of the sequences of each worker
        self._home: dict[int, int] = {}

    def run(self) -> SimRollout:
        for number in range(len(self.workers)):
            self.state.take(Joined(number, 1))
        self._decide(0.0)
        while len(self.state.done) < len(self.requests):
            number = self._next_to_end()
            worker = self.workers[number]
            request, now = worker.finish_next()
            self.result.ended[request] = now
            self.state.take(Done(self._home[request], 1, request))
            self.state.take(Load(number, 1, len(worker.waiting)))
            self._changed(number)
            if not worker.batch:
                self._dry_since[number] = now
                self._decide(now)
                self._share(number, now)
        self.result.seconds = max(self.result.ended.values(), default=0.0)
        for number in range(len(self.workers)):
            self._not_dry(number, self.result.seconds)
        return self.result

    def _changed(self, number: int) -> None:
        """Note when a worker's next sequence ends now; what was noted before is outdated."""
        self._changes[number] += 1
        if self.workers[number].batch:
            heapq.heappush(self._ends, (self.workers[number].next_end, number, self._changes[number]))

    def _next_to_end(self) -> int:
        """The worker whose sequence ends next."""
        while True:
            _, number, changes = heapq.heappop(self._ends)
            if changes == self._changes[number]:
                return number

    def _decide(self, now: float) -> None:
        """Carry out orders until there are none: what is released is free, and is dealt anew."""
        while orders := decide(self.state, train=False):
            for order in orders:
                self._carry_out(order, now)

    def _carry_out(self, order: Order, now: float) -> None:
        self.state.note(order)
        worker = self.workers[order.worker]
        if isinstance(order, Assign):
            self._not_dry(order.worker, now)
            self._home |= dict.fromkeys(order.requests, order.worker)
            worker.assign(order.requests, now)
            self._changed(order.worker)
            self.state.take(Load(order.worker, 1, len(worker.waiting)))
        elif isinstance(order, Release):
            self.state.take(Released(order.worker, 1, tuple(worker.release(order.count))))

    def _not_dry(self, number: int, now: float) -> None:
        since = self._dry_since[number]
        if since is not None and now > since:
            self.result.dry.append((since, now))
        self._dry_since[number] = None

    def _share(self, taker: int, now: float) -> None:
        """A worker has run dry, and no request waits: it takes half of the sequences of the one that has most, if they
        are expected to end sooner there."""
        if self.moving is None or any(worker.waiting for worker in self.workers):
            return
        giving = max(self.workers, key=lambda worker: worker.batch)
        count = giving.batch // 2
        if self.workers[taker].batch or not count:
            return
        giving.run_until(now)
        written = giving.written
        saved_s = self.curve.at(giving.batch) - self.curve.at(giving.batch - count)  # a token
        cost_s = count * self.moving.cost_s(written)
        if cost_s >= saved_s * self.moving.expected_left(written):
            return
        given = giving.give(count)
        self._not_dry(taker, now)
        self.workers[taker].take(given, now, cost_s)
        for number in (taker, self.workers.index(giving)):
            self._changed(number)
        self.result.moved += count
