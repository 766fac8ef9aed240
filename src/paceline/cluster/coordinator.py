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
    AHEAD = "ahead"
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
class WroteAhead(Report):
    """All that it was to write ahead is written."""


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
    """Decode these; whoever trains or writes ahead stops."""

    requests: tuple[int, ...]


@dataclass(frozen=True)
class Release(Order):
    """Give up to so many requests that have not begun, for another worker."""

    count: int
    taker: int


@dataclass(frozen=True)
class WriteAhead(Order):
    """Begin these requests of the next step with the present policy."""

    requests: tuple[int, ...]


@dataclass(frozen=True)
class Train(Order):
    pass


@dataclass(frozen=True)
class Stop(Order):
    """No more training, and no more writing ahead."""


@dataclass
class WorkerState:
    """What is known of a worker."""

    generation: int = 0
    alive: bool = False
    in_flight: set[int] = field(default_factory=set)
    waiting: int = 0  # of those in flight, how many have not begun, as it said last
    training: bool = False
    writing: bool = False
    ahead: tuple[int, ...] = ()  # requests of the next step that it has begun, or is to begin when it has nothing else
    asked: int | None = None  # the worker for which it was asked to release requests, until it answers

    @property
    def status(self) -> Status:
        if not self.alive:
            return Status.LOST
        if self.in_flight:
            return Status.BUSY
        if self.writing:
            return Status.AHEAD
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
        self.coming: list[int] = []
        """Requests of the next step that nobody has begun, in the order in which they should be; a group lies
        together."""

    def take(self, report: Report) -> bool:
        """Enter a report -> whether it was believed: one from a former generation is not."""
        state = self.workers[report.worker]
        if isinstance(report, Joined | Lost):
            # The loss of a generation may be known before its beginning, and a new one before the end of the last.
            ends = isinstance(report, Lost) and state.alive
            if report.generation < state.generation or (report.generation == state.generation and not ends):
                return False
            self.free |= state.in_flight
            self.coming = [*state.ahead, *self.coming]
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
        elif isinstance(report, WroteAhead):
            state.ahead = ()
            state.writing = False
        return True

    def note(self, order: Order) -> None:
        """An order has been sent."""
        state = self.workers[order.worker]
        if isinstance(order, Assign):
            self.free -= set(order.requests)
            state.in_flight |= set(order.requests)
            state.training = False
            state.writing = False
        elif isinstance(order, Release):
            state.asked = order.taker
        else:
            state.training = isinstance(order, Train)
            state.writing = isinstance(order, WriteAhead)
            if isinstance(order, WriteAhead):
                state.ahead = order.requests
                taken = set(order.requests)
                self.coming = [request for request in self.coming if request not in taken]

    @property
    def over(self) -> bool:
        """Every request is done and nobody trains or writes ahead any more."""
        occupied = any(state.training or state.writing for state in self.workers)
        return len(self.done) == len(self.expected) and not occupied


def decide(rollout: RolloutState, train: bool = True, train_first: bool = False) -> list[Order]:
    """What to do now. `train` is whether there is a drafter to train and something to train it on, `train_first`
    whether that comes before writing ahead. Requests of this rollout come before both."""
    if len(rollout.done) == len(rollout.expected):
        return [Stop(w, "the last answer is in") for w, state in _with(rollout, Status.TRAINING, Status.AHEAD)]
    if rollout.free:
        return _deal(rollout)
    orders: list[Order] = []
    promised = {state.asked for state in rollout.workers}
    donors = [w for w, state in _with(rollout, Status.BUSY) if state.waiting and state.asked is None]
    donors.sort(key=lambda w: -rollout.workers[w].waiting)
    begun: set[int] = set()
    for worker, state in _with(rollout, Status.IDLE, Status.TRAINING, Status.AHEAD):
        if worker in promised:
            continue
        if donors:
            donor = donors.pop(0)
            waiting = rollout.workers[donor].waiting
            orders.append(Release(donor, f"worker {worker} has run dry, {waiting} wait here", -(-waiting // 2), worker))
            if state.training:
                orders.append(Stop(worker, f"there is something to take from worker {donor}"))
        elif state.writing:
            continue
        elif train and train_first:
            if not state.training:
                orders.append(Train(worker, "nothing to decode, and training is due"))
        elif ahead := state.ahead or _share_ahead(rollout, begun):
            begun |= set(ahead)
            orders.append(WriteAhead(worker, f"nothing to decode, {len(ahead)} of the next step to begin", ahead))
        elif train and not state.training:
            orders.append(Train(worker, "nothing to decode and nothing to take"))
    return orders


def _share_ahead(rollout: RolloutState, begun: set[int]) -> tuple[int, ...]:
    """Of the next step's requests that nobody has begun, the first ones: one part of as many as workers live, in whole
    groups."""
    groups: dict[int, list[int]] = {}
    for request in rollout.coming:
        if request not in begun:
            groups.setdefault(request // rollout.group, []).append(request)
    living = sum(state.alive for state in rollout.workers)
    part = list(groups.values())[: -(-len(groups) // living)]
    return tuple(request for group in part for request in group)


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
