"""The coordinator among workers that are slow, die at any moment, and whose messages come late."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cluster.coordinator import (
    Assign,
    Done,
    Joined,
    Load,
    Lost,
    Order,
    Release,
    Released,
    Report,
    RolloutState,
    Status,
    Stop,
    Train,
    WriteAhead,
    WroteAhead,
    decide,
)


class Worker:
    """One generation of a worker: orders reach it in order and late, and so do its reports."""

    def __init__(self, number: int, generation: int):
        self.number, self.generation = number, generation
        self.orders: deque[Order] = deque()
        self.reports: deque[Report] = deque([Joined(number, generation)])
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.training = False
        self.ahead: list[int] = []

    def act(self, slots: int) -> None:
        """Obey the next order, or else begin, finish or just go on."""
        if self.orders:
            self._obey(self.orders.popleft())
        elif self.waiting and len(self.running) < slots:
            self.running.append(self.waiting.pop(0))
            self.reports.append(Load(self.number, self.generation, len(self.waiting)))
        elif self.running:
            self.reports.append(Done(self.number, self.generation, self.running.pop(0)))
        elif self.ahead:
            self.ahead.pop(0)
            if not self.ahead:
                self.reports.append(WroteAhead(self.number, self.generation))

    def _obey(self, order: Order) -> None:
        if isinstance(order, Assign):
            assert not set(order.requests) & {*self.waiting, *self.running}
            self.waiting += order.requests
            self.training = False
            self.ahead = []
            self.reports.append(Load(self.number, self.generation, len(self.waiting)))
        elif isinstance(order, Release):
            given_up = tuple(self.waiting[len(self.waiting) - min(order.count, len(self.waiting)) :])
            self.waiting = self.waiting[: len(self.waiting) - len(given_up)]
            self.reports.append(Released(self.number, self.generation, given_up))
            self.reports.append(Load(self.number, self.generation, len(self.waiting)))
        else:
            self.training = isinstance(order, Train)
            self.ahead = list(order.requests) if isinstance(order, WriteAhead) else []


class Cluster:
    def __init__(self, workers: int, requests: int, slots: int, coming: int):
        expected = {r: 1.0 + r % 5 for r in range(requests)}
        self.step, self.slots = RolloutState(workers, expected, group=1 + requests % 4), slots
        self.step.coming = list(range(requests, requests + coming))
        self.coming = set(self.step.coming)
        self.workers: list[Worker | None] = [Worker(w, 1) for w in range(workers)]
        self.generations = [1] * workers
        self.late: list[Report] = []  # of former generations, still on their way
        self.finished: list[int] = []

    def deliver(self, report: Report) -> None:
        if self.step.take(report) and isinstance(report, Done):
            self.finished.append(report.request)
        self.check_books()
        # The driver asks again and again; what follows from an order comes with the next answer.
        while orders := decide(self.step):
            for order in orders:
                assert order.reason
                self.step.note(order)
                worker = self.workers[order.worker]
                if worker is not None and worker.generation == self.step.workers[order.worker].generation:
                    worker.orders.append(order)
        self.check_books()
        self.check_nobody_trains_who_could_decode()

    def check_books(self) -> None:
        assigned = [r for d in self.step.workers for r in d.in_flight]
        assert len(assigned) == len(set(assigned)), "nobody decodes what another one does"
        everywhere = sorted([*assigned, *self.step.free, *self.step.done])
        assert everywhere == sorted(self.step.expected), "every request is in exactly one place"
        assert len(self.finished) == len(set(self.finished))
        begun = [r for d in self.step.workers for r in d.ahead]
        assert len(begun) == len(set(begun)) and not set(begun) & set(self.step.coming), "nobody begins it twice"
        assert {*begun, *self.step.coming} <= self.coming

    def check_nobody_trains_who_could_decode(self) -> None:
        promised = {d.asked for d in self.step.workers}  # these go on writing ahead until they get something
        spare = [
            d
            for w, d in enumerate(self.step.workers)
            if d.status is Status.TRAINING or (d.status is Status.AHEAD and w not in promised)
        ]
        if any(d.status is Status.TRAINING for d in spare):
            assert not self.step.coming, "what the next step waits for comes first"
        if spare:
            assert not self.step.free and len(self.step.done) < len(self.step.expected)
            assert not any(d.waiting and d.asked is None for d in self.step.workers if d.status is Status.BUSY)

    def kill(self, number: int) -> None:
        worker = self.workers[number]
        if worker is not None:
            self.late += worker.reports
            self.workers[number] = None
            self.deliver(Lost(number, worker.generation))

    def restart(self, number: int) -> None:
        if self.workers[number] is None:
            self.generations[number] += 1
            self.workers[number] = Worker(number, self.generations[number])

    def event(self, kind: str, number: int) -> None:
        number %= len(self.workers)
        worker = self.workers[number]
        if kind == "kill":
            self.kill(number)
        elif kind == "restart":
            self.restart(number)
        elif kind == "late" and self.late:
            self.deliver(self.late.pop(number % len(self.late)))
        elif worker is not None and kind == "act":
            worker.act(self.slots)
        elif worker is not None and worker.reports and kind == "report":
            self.deliver(worker.reports.popleft())

    def drain(self) -> int:
        """Let everything that is on its way arrive, with no more losses -> how many events that took."""
        for number in range(len(self.workers)):
            self.restart(number)
        events = 0
        while not self.step.over or any(w and (w.orders or w.reports) for w in self.workers):
            for number in range(len(self.workers)):
                for kind in ("act", "report", "late"):
                    self.event(kind, number)
                    events += 1
            assert events < 2000 * (1 + len(self.step.expected)), "it comes to rest"
        return events


EVENTS = st.lists(
    st.tuples(st.sampled_from(["act", "act", "report", "report", "late", "kill", "restart"]), st.integers(0, 7)),
    max_size=60,
)


def play(workers: int, requests: int, slots: int, coming: int, events: list[tuple[str, int]]) -> None:
    cluster = Cluster(workers, requests, slots, coming)
    for kind, number in events:
        cluster.event(kind, number)
    cluster.drain()
    assert sorted(cluster.finished) == list(range(requests)), "every request ends exactly once"
    assert decide(cluster.step) == [] and not any(w and (w.training or w.ahead) for w in cluster.workers)


@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 3), st.integers(0, 9), EVENTS)
def test_any_sequence_of_reports_losses_and_late_messages(workers, requests, slots, coming, events):
    play(workers, requests, slots, coming, events)


@pytest.mark.soak
@settings(max_examples=12_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 3), st.integers(0, 9), EVENTS)
def test_any_sequence_at_length(workers, requests, slots, coming, events):
    play(workers, requests, slots, coming, events)


def joined(workers: int, expected: dict[int, float]) -> RolloutState:
    step = RolloutState(workers, expected)
    for worker in range(workers):
        step.take(Joined(worker, 1))
    return step


def carry_out(step: RolloutState, train: bool = True) -> list[Order]:
    orders = decide(step, train)
    for order in orders:
        step.note(order)
    return orders


def test_long_answers_are_dealt_apart():
    step = joined(2, {0: 100, 1: 90, 2: 10, 3: 10, 4: 5})
    carry_out(step)
    loads = [sum(step.expected[r] for r in d.in_flight) for d in step.workers]
    assert max(loads) <= 110 and {0, 1}.isdisjoint(step.workers[0].in_flight & step.workers[1].in_flight)
    assert not {0, 1} <= step.workers[0].in_flight


def test_who_runs_dry_takes_from_the_most_loaded_and_then_trains():
    step = joined(3, dict.fromkeys(range(9), 1.0))
    carry_out(step)
    for request in list(step.workers[0].in_flight):
        step.take(Done(0, 1, request))
    step.take(Load(1, 1, 1))
    step.take(Load(2, 1, 2))
    (release,) = carry_out(step)
    assert release == Release(2, release.reason, 1, 0) and "worker 0" in release.reason
    assert carry_out(step) == [], "it waits for the answer, and nobody is asked twice"
    given_up = min(step.workers[2].in_flight)
    step.take(Released(2, 1, (given_up,)))
    (assign,) = carry_out(step)
    assert isinstance(assign, Assign) and assign.requests == (given_up,) and step.workers[0].status is Status.BUSY
    step.take(Load(1, 1, 0))
    step.take(Done(0, 1, given_up))
    (train,) = carry_out(step)
    assert isinstance(train, Train) and step.workers[0].status is Status.TRAINING


def test_training_ends_with_the_last_answer_and_never_begins_without_a_drafter():
    step = joined(2, {0: 1.0, 1: 1.0})
    carry_out(step)
    first, second = min(step.workers[0].in_flight), min(step.workers[1].in_flight)
    step.take(Done(0, 1, first))
    assert decide(step, train=False) == []
    assert [type(o) for o in carry_out(step)] == [Train]
    step.take(Done(1, 1, second))
    assert not step.over
    assert [type(o) for o in carry_out(step)] == [Stop] and step.over


def test_a_former_life_is_not_believed():
    step = joined(1, {0: 1.0})
    carry_out(step)
    step.take(Lost(0, 1))
    assert step.workers[0].status is Status.LOST and decide(step) == []
    assert not step.take(Done(0, 1, 0)) and not step.take(Joined(0, 1))
    assert step.take(Joined(0, 2))
    assert [o.requests for o in carry_out(step) if isinstance(o, Assign)] == [(0,)]
    assert not step.take(Done(0, 1, 0)) and step.take(Done(0, 2, 0)) and step.over


def test_who_runs_dry_begins_the_next_step_then_trains_and_stops_for_real_work():
    step = joined(3, dict.fromkeys(range(3), 1.0))
    carry_out(step)
    step.coming = [12, 10, 11, 13]
    mine = {w: min(d.in_flight) for w, d in enumerate(step.workers)}
    step.take(Done(0, 1, mine[0]))
    (write,) = carry_out(step)
    assert isinstance(write, WriteAhead) and write.requests == (12, 10) and step.workers[0].status is Status.AHEAD
    step.take(Done(1, 1, mine[1]))
    assert [o.requests for o in carry_out(step) if isinstance(o, WriteAhead)] == [(11,)], "a share of what is left"
    step.take(Lost(2, 1))
    (assign,) = carry_out(step)
    assert isinstance(assign, Assign) and step.workers[assign.worker].status is Status.BUSY
    step.take(Done(assign.worker, 1, mine[2]))
    (stop,) = carry_out(step)
    assert isinstance(stop, Stop) and stop.worker != assign.worker and step.over
