"""Who decodes what, and who trains the drafter meanwhile.

Workers report, the coordinator decides. `RolloutState` keeps what is known of one rollout: which requests are in flight
on which worker. It takes reports and notes orders. `decide` is a pure function of it: orders with their reasons.

A request is always in one of three sets: free, in flight on one worker, or done. A worker that is lost gives back what
was in flight on it. Each start of a worker has a generation number, and reports of former generations are ignored.
Moving a request changes nothing about its tokens, which are a function of the policy, the request and the position.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    BUSY = "busy"
    IDLE = "idle"
    TRAINING = "training"
    LOST = "lost"


@dataclass(frozen=True)
class Report:
    """What a worker says, or what is known of it."""

    worker: int
    generation: int
    """Counts the starts of this worker, from 1."""


@dataclass(frozen=True)
class Done(Report):
    request: int


@dataclass(frozen=True)
class Load(Report):
    """How many of its requests have not begun."""

    waiting: int


@dataclass(frozen=True)
class Released(Report):
    """In reply to `Release`: requests that it will not begin. There may be fewer than were asked for, or none."""

    requests: tuple[int, ...]


@dataclass(frozen=True)
class Lost(Report):
    """It died, or said nothing for too long."""


@dataclass(frozen=True)
class Joined(Report):
    """It is there, for the first time or again, and has no requests."""


@dataclass(frozen=True)
class Order:
    worker: int
    reason: str


@dataclass(frozen=True)
class Assign(Order):
    """Decode these; whoever trains stops."""

    requests: tuple[int, ...]


@dataclass(frozen=True)
class Release(Order):
    """Give up to so many requests that have not begun, for another worker."""

    count: int
    taker: int


@dataclass(frozen=True)
class Train(Order):
    pass


@dataclass(frozen=True)
class Stop(Order):
    """No more training."""


@dataclass
class WorkerState:
    """What is known of a worker."""

    generation: int = 0
    alive: bool = False
    in_flight: set[int] = field(default_factory=set)
    waiting: int = 0  # of those in flight, how many have not begun, as it said last
    training: bool = False
    asked: int | None = None  # the worker for which it was asked to release requests, until it answers

    @property
    def status(self) -> Status:
        if not self.alive:
            return Status.LOST
        if self.in_flight:
            return Status.BUSY
        return Status.TRAINING if self.training else Status.IDLE


class RolloutState:
    """All that is known of one rollout."""

    def __init__(self, workers: int, expected: dict[int, float], group: int = 1):
        """`expected` is the expected length of each request's completion, in tokens: requests are dealt so that
        workers end together. Those of a `group`, whose ids are neighbours, share a prompt and stay together if they
        can."""
        self.expected = expected
        self.group = group
        self.workers = [WorkerState() for _ in range(workers)]
        self.free = set(expected)  # in flight nowhere
        self.done: set[int] = set()

    def take(self, report: Report) -> bool:
        """Enter a report -> whether it was believed: one from a former generation is not."""
        state = self.workers[report.worker]
        if isinstance(report, Joined | Lost):
            # The loss of a generation may be known before its beginning, and a new one before the end of the last.
            ends = isinstance(report, Lost) and state.alive
            if report.generation < state.generation or (report.generation == state.generation and not ends):
                return False
            self.free |= state.in_flight
            self.workers[report.worker] = WorkerState(report.generation, alive=isinstance(report, Joined))
            return True
        if not state.alive or report.generation != state.generation:
            return False
        if isinstance(report, Done):
            state.in_flight.remove(report.request)
            state.waiting = min(state.waiting, len(state.in_flight))
            self.done.add(report.request)
        elif isinstance(report, Load):
            state.waiting = min(report.waiting, len(state.in_flight))
        elif isinstance(report, Released):
            state.asked = None
            state.in_flight -= set(report.requests)
            self.free |= set(report.requests)
            # Until it says otherwise there is nothing left to give: nobody is asked twice for nothing.
            state.waiting = 0
        return True

    def note(self, order: Order) -> None:
        """An order has been sent."""
        state = self.workers[order.worker]
        if isinstance(order, Assign):
            self.free -= set(order.requests)
            state.in_flight |= set(order.requests)
            state.training = False
        elif isinstance(order, Release):
            state.asked = order.taker
        else:
            state.training = isinstance(order, Train)

    @property
    def over(self) -> bool:
        """Every request is done and nobody trains any more."""
        return len(self.done) == len(self.expected) and not any(state.training for state in self.workers)


def decide(rollout: RolloutState, train: bool = True) -> list[Order]:
    """What to do now. `train` is whether there is a drafter to train and something to train it on."""
    if len(rollout.done) == len(rollout.expected):
        return [Stop(w, "the last answer is in") for w, state in _with(rollout, Status.TRAINING)]
    if rollout.free:
        return _deal(rollout)
    orders: list[Order] = []
    promised = {state.asked for state in rollout.workers}
    donors = [w for w, state in _with(rollout, Status.BUSY) if state.waiting and state.asked is None]
    donors.sort(key=lambda w: -rollout.workers[w].waiting)
    for worker, state in _with(rollout, Status.IDLE, Status.TRAINING):
        if worker in promised:
            continue
        if donors:
            donor = donors.pop(0)
            waiting = rollout.workers[donor].waiting
            orders.append(Release(donor, f"worker {worker} has run dry, {waiting} wait here", -(-waiting // 2), worker))
            if state.training:
                orders.append(Stop(worker, f"there is something to take from worker {donor}"))
        elif train and not state.training:
            orders.append(Train(worker, "nothing to decode and nothing to take"))
    return orders


def _deal(rollout: RolloutState) -> list[Order]:
    """Give free requests to the living: the longest first, each to the worker with the fewest expected tokens. A group
    goes as one while there are enough groups for everybody."""
    living = [w for w, state in enumerate(rollout.workers) if state.alive]
    if not living:
        return []
    groups: dict[int, list[int]] = {}
    for request in sorted(rollout.free):
        groups.setdefault(request // rollout.group, []).append(request)
    lots = list(groups.values()) if len(groups) >= len(living) else [[request] for request in sorted(rollout.free)]
    length = {lot[0]: sum(rollout.expected[r] for r in lot) for lot in lots}
    load = {w: sum(rollout.expected[r] for r in rollout.workers[w].in_flight) for w in living}
    shares: dict[int, list[int]] = {}
    for lot in sorted(lots, key=lambda lot: (-length[lot[0]], lot[0])):
        worker = min(living, key=lambda w: (load[w], w))
        load[worker] += length[lot[0]]
        shares.setdefault(worker, []).extend(lot)
    return [Assign(w, f"{len(ids)} requests without a worker", tuple(ids)) for w, ids in sorted(shares.items())]


def _with(rollout: RolloutState, *status: Status) -> Iterable[tuple[int, WorkerState]]:
    return [(w, state) for w, state in enumerate(rollout.workers) if state.status in status]
