"""Who decodes what, and who trains the drafter meanwhile.

Workers report, the coordinator decides. Its books say which requests each worker holds; what a worker is doing follows
from them. `decide` is a pure function of the books: it gives orders with their reasons, and changes nothing.
`RolloutState` keeps the books of one rollout: it takes reports and notes orders.

A request is always in one place: waiting for a worker, held by one, or done. A worker that is lost gives back what it
held, and whatever its former life still says is not believed, because each life of a worker has a number. Moving a
request changes nothing about its tokens, which are a function of its key.
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
    life: int


@dataclass(frozen=True)
class Done(Report):
    request: int


@dataclass(frozen=True)
class Load(Report):
    """Requests that it holds and has not begun."""

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
    """It is there, for the first time or again, and holds nothing."""


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
    """What the books say about a worker."""

    life: int = 0
    alive: bool = False
    holds: set[int] = field(default_factory=set)
    waiting: int = 0  # of those it holds, as it said last
    training: bool = False
    asked: int | None = None  # the worker for which it was asked to release requests, until it answers

    @property
    def status(self) -> Status:
        if not self.alive:
            return Status.LOST
        if self.holds:
            return Status.BUSY
        return Status.TRAINING if self.training else Status.IDLE


class RolloutState:
    """The books of one rollout."""

    def __init__(self, workers: int, expected: dict[int, float], group: int = 1):
        """`expected` is how long each request's answer may become: they are dealt so that workers end together. Those
        of a `group`, whose numbers are neighbours, have the same prompt and stay together if they can."""
        self.expected, self.group = expected, group
        self.desks = [WorkerState() for _ in range(workers)]
        self.free = set(expected)  # held by nobody
        self.done: set[int] = set()

    def take(self, report: Report) -> bool:
        """Enter a report -> whether it was believed: one from a former life is not."""
        desk = self.desks[report.worker]
        if isinstance(report, Joined | Lost):
            # The loss of a life may be known before its beginning, and a new one before the end of the last.
            if report.life < desk.life or (report.life == desk.life and not (isinstance(report, Lost) and desk.alive)):
                return False
            self.free |= desk.holds
            self.desks[report.worker] = WorkerState(report.life, alive=isinstance(report, Joined))
            return True
        if not desk.alive or report.life != desk.life:
            return False
        if isinstance(report, Done):
            desk.holds.remove(report.request)
            desk.waiting = min(desk.waiting, len(desk.holds))
            self.done.add(report.request)
        elif isinstance(report, Load):
            desk.waiting = min(report.waiting, len(desk.holds))
        elif isinstance(report, Released):
            desk.asked = None
            desk.holds -= set(report.requests)
            self.free |= set(report.requests)
            # Until it says otherwise there is nothing left to give: nobody is asked twice for nothing.
            desk.waiting = 0
        return True

    def note(self, order: Order) -> None:
        """An order has been sent."""
        desk = self.desks[order.worker]
        if isinstance(order, Assign):
            self.free -= set(order.requests)
            desk.holds |= set(order.requests)
            desk.training = False
        elif isinstance(order, Release):
            desk.asked = order.taker
        else:
            desk.training = isinstance(order, Train)

    @property
    def over(self) -> bool:
        """Every request is done and nobody trains any more."""
        return len(self.done) == len(self.expected) and not any(d.training for d in self.desks)


def decide(step: RolloutState, train: bool = True) -> list[Order]:
    """What to do now. `train` is whether there is a drafter to train and something to learn from."""
    if len(step.done) == len(step.expected):
        return [Stop(w, "the last answer is in") for w, d in _with(step, Status.TRAINING)]
    if step.free:
        return _deal(step)
    orders: list[Order] = []
    promised = {d.asked for d in step.desks}
    givers = [w for w, d in _with(step, Status.BUSY) if d.waiting and d.asked is None]
    givers.sort(key=lambda w: -step.desks[w].waiting)
    for worker, desk in _with(step, Status.IDLE, Status.TRAINING):
        if worker in promised:
            continue
        if givers:
            giver = givers.pop(0)
            waiting = step.desks[giver].waiting
            orders.append(Release(giver, f"worker {worker} has run dry, {waiting} wait here", -(-waiting // 2), worker))
            if desk.training:
                orders.append(Stop(worker, f"there is something to take from worker {giver}"))
        elif train and not desk.training:
            orders.append(Train(worker, "nothing to decode and nothing to take"))
    return orders


def _deal(step: RolloutState) -> list[Order]:
    """Give requests that nobody holds to the living: the longest first, each to whom has least to write. A group
    goes as one while there are enough groups for everybody."""
    living = [w for w, d in enumerate(step.desks) if d.alive]
    if not living:
        return []
    groups: dict[int, list[int]] = {}
    for request in sorted(step.free):
        groups.setdefault(request // step.group, []).append(request)
    lots = list(groups.values()) if len(groups) >= len(living) else [[request] for request in sorted(step.free)]
    length = {lot[0]: sum(step.expected[r] for r in lot) for lot in lots}
    load = {w: sum(step.expected[r] for r in step.desks[w].holds) for w in living}
    shares: dict[int, list[int]] = {}
    for lot in sorted(lots, key=lambda lot: (-length[lot[0]], lot[0])):
        worker = min(living, key=lambda w: (load[w], w))
        load[worker] += length[lot[0]]
        shares.setdefault(worker, []).extend(lot)
    return [Assign(w, f"{len(ids)} requests without a worker", tuple(ids)) for w, ids in sorted(shares.items())]


def _with(step: RolloutState, *status: Status) -> Iterable[tuple[int, WorkerState]]:
    return [(w, d) for w, d in enumerate(step.desks) if d.status in status]
