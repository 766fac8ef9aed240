"""The driver's side of the workers: it carries out the coordinator's orders and has updates made by all together.

A worker that is lost takes nothing with it: its requests go to the others, what it held of the optimizer's state is
held twice, and whatever was being done together is done again by the rest. It comes back between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cluster.ahead import Ahead
from paceline.cluster.calls import Calls
from paceline.cluster.coordinator import (
    Assign,
    Done,
    Joined,
    Load,
    Order,
    Release,
    RolloutState,
    Status,
    Train,
    WriteAhead,
    decide,
)
from paceline.cluster.groups import WorkerGroup
from paceline.cluster.liveness import POLL_S, Liveness
from paceline.cluster.messages import Ready, RolloutMode, RolloutOutcome, RolloutProgress, WorkerSpec
from paceline.cluster.turns import TURN_POLL_S, OpenTurns
from paceline.cluster.update import SharedUpdate
from paceline.errors import WorkerFailed
from paceline.learn.token_sums import mean_metrics

if TYPE_CHECKING:
    from paceline.cluster.ahead import Coming
    from paceline.cluster.transport import Transport
    from paceline.cluster.turns import TurnAnswers
    from paceline.config import Config
    from paceline.core import Completion, Request, Trajectory
    from paceline.rollout.differences import Difference
    from paceline.spot.evaluation import Evaluation
    from paceline.spot.trainer import TrainingStats


class Cluster:
    def __init__(
        self,
        config: Config,
        transport: Transport,
        make_spec: Callable[[int, int], WorkerSpec],
        note: Callable[[str], None],
        backend: str = "gloo",
        on_error: Callable[[str, str], object] = lambda where, trace: None,
    ):
        """`make_spec` makes the spec of a generation of a worker; `note` hears of losses; `backend` sums gradients;
        `on_error` keeps tracebacks of errors that do not stop the run."""
        self.config = config
        self.transport = transport
        self.liveness = Liveness(config, transport, make_spec, note, on_error)
        self.calls = Calls(transport, self.liveness)
        self.group = WorkerGroup(config, self.liveness, self.calls, backend)
        self.updating = False
        """Whether the policy is neither what it was before an update nor what it is after it."""
        self.save_failure: WorkerFailed | None = None
        """Of a worker without which the last checkpoint was saved."""
        self.tokens = 0
        """Generated in the present rollout."""
        self.completed_by: dict[int, int] = {}
        """Request -> the worker that completed it."""
        writes = config.rollout.write_ahead and config.cluster.workers > 1
        untrained = config.speculation.drafter == "new"
        self.ahead = Ahead(config.rollout.prefill_tokens, untrained) if writes else None
        """What workers have written ahead; None where they do not."""
        self._requests: Sequence[Request] = ()  # of the present rollout, if what was written ahead of them is used
        self.decisions: list[tuple[float, Order]] = []
        """Orders of the present rollout, each with its reason, and when they were given."""

    @property
    def workers(self) -> tuple[int, ...]:
        """Workers that decode and learn at present."""
        return self.liveness.workers

    @property
    def lost(self) -> list[int]:
        """Workers that were lost, in order."""
        return self.liveness.lost

    @property
    def absences(self) -> list[tuple[int, float, float]]:
        """Workers that came back: since when they were missed, and until when."""
        return self.liveness.absences

    def start(self) -> Ready:
        """Start all workers and wait for them."""
        self.group.start()
        if hosts := self.transport.hosts():
            self.liveness.note("workers: " + ", ".join(f"{worker} on {host}" for worker, host in sorted(hosts.items())))
        assert self.liveness.facts is not None
        return self.liveness.facts

    # Rollout

    def rollout(
        self,
        step: int,
        requests: Sequence[Request],
        expected: dict[int, float],
        mode: RolloutMode,
        train: bool,
        group: int | None = None,
        coming: Coming | None = None,
        answers: TurnAnswers | None = None,
    ) -> Iterator[list[Completion]]:
        """Completions as they are finished, some at a time or none. `expected` is the expected length of each. With
        `train`, whoever has nothing to decode trains the drafter until the last one is in. A `group` is so many ids,
        `rollout.samples` if not given. `coming` tells what comes after `requests`, for workers to write ahead; without
        it, what was written ahead is not used. `answers` answers turns of requests that act."""
        self.group.admit()
        workers = self.config.cluster.workers
        ahead = self.ahead if coming else None
        expected = ahead.left(requests, expected) if ahead else expected
        state = RolloutState(workers, expected, group or self.config.rollout.samples)
        by_id = {request.id: request for request in requests}
        turns = OpenTurns(answers)
        self._requests = requests if ahead else ()
        tokens = [0] * workers
        self.decisions = []
        self.tokens = 0
        for worker in self.workers:
            state.take(Joined(worker, self.liveness.generation(worker)))
        self.calls.send(self.workers, "begin", step, mode, train)
        first_idle: float | None = None
        self._decide(state, by_id, train)
        if ahead and coming:  # only now, so that nobody waits for it
            chosen = ahead.choose(coming())
            by_id |= {request.id: request for request in chosen}
            state.coming = [request.id for request in chosen]
        while True:
            if first_idle is None and any(s.status not in (Status.BUSY, Status.LOST) for s in state.workers):
                first_idle = time.monotonic()
            idle_s = 0.0 if first_idle is None else time.monotonic() - first_idle
            self._decide(state, by_id, train, train_first=ahead is not None and idle_s < ahead.training_s)
            if state.over:
                return
            done: list[Completion] = []
            for worker, observations in turns.answered(state).items():
                self.calls.send((worker,), "observe", observations)
            busy = turns.not_only_waiting(state)
            for report in self.liveness.listen(TURN_POLL_S if turns else POLL_S, busy):
                if not isinstance(report, RolloutProgress):
                    state.take(report)
                    continue
                for completion in report.completions:
                    if state.take(Done(report.worker, report.generation, completion.request.id)):
                        done.append(completion)
                        self.completed_by[completion.request.id] = report.worker
                turns.ended(report, state.take(Load(report.worker, report.generation, report.waiting)))
                tokens[report.worker] = report.tokens
            self.tokens = sum(tokens)
            if not any(s.alive for s in state.workers):
                raise self.liveness.all_lost()
            yield done

    def _decide(self, state: RolloutState, by_id: dict[int, Request], train: bool, train_first: bool = False) -> None:
        for order in decide(state, train, train_first):
            self._carry_out(order, by_id)
            state.note(order)

    def _carry_out(self, order: Order, requests: dict[int, Request]) -> None:
        self.decisions.append((time.time(), order))
        worker = (order.worker,)
        if isinstance(order, Assign | WriteAhead):
            some = [requests[i] for i in order.requests]
            name = "assign" if isinstance(order, Assign) else "write_ahead"
            self.calls.send(worker, name, some, self.ahead.known(some) if self.ahead and self._requests else {})
        elif isinstance(order, Release):
            self.calls.send(worker, "release", order.count)
        else:
            self.calls.send(worker, "train" if isinstance(order, Train) else "stop")

    def end(self) -> dict[int, RolloutOutcome]:
        """What the rollout came to, worker by worker."""
        outcomes: dict[int, RolloutOutcome] = self.group.all("end")
        if self.ahead and self._requests:
            step = next(iter(outcomes.values())).step
            self.ahead.take(step, self._requests, list(outcomes.values()))
        return outcomes

    def clear(self) -> None:
        """Give up the rollout that is going on."""
        self.calls.send(self.workers, "clear")

    def explain(self, pairs: list[tuple[Completion, Completion]]) -> list[Difference]:
        """Why completions of the same requests differ, if any do."""
        if not pairs:
            return []
        return next(iter(self.group.until_done(lambda: {self.workers[0]: ("explain", (pairs,))}).values()))

    # Learning

    def update(self, trajectories: list[Trajectory], step: int) -> dict[str, float]:
        """One step of learning, by all together."""
        shared = SharedUpdate(self.config.learn, self.group, trajectories)
        metrics = []
        for update in range(shared.prepare(step)):
            shared.gradients(update)
            self.updating = True
            metrics.append(shared.apply(update))
        self.updating = False
        return mean_metrics(metrics)

    # The drafter

    def train_drafter(self, seconds: float) -> TrainingStats:
        """Have everybody train the drafter for so long -> what was trained since the rollout began."""
        stats = list(self.group.all("train_drafter", lambda: (seconds,)).values())
        return sum(stats[1:], stats[0])

    def merge_drafters(self) -> Evaluation | None:
        """Make the next version from the drafters of all that trained; all take it if it is not worse. None if nobody
        trained, or if there is nothing to evaluate on: then training goes on, and the next time decides."""
        evaluation: Evaluation | None = next(iter(self.group.all("merge_drafters").values()))
        if evaluation is None or not evaluation.tokens:
            return None
        self.group.all("accept_drafter", lambda: (evaluation,))
        return evaluation

    # Checkpoints

    def save(self, folder: Path) -> dict[str, Any]:
        """Have a checkpoint written -> the first worker's tuner state. A worker that cannot do its part is given up if
        others can do it; its error is kept in `save_failure`."""
        while True:
            try:
                return self._save(folder)
            except WorkerFailed as err:
                if not self.group.can_do_without(err.worker):
                    raise
                self.liveness.give_up(err.worker, f"could not save its part ({err})", again=False)
                self.save_failure = self.save_failure or err

    def _save(self, folder: Path) -> dict[str, Any]:
        folder = folder.resolve()  # actors have a working directory of their own

        def anew() -> tuple[Path, int]:
            for file in folder.glob("learner-*"):  # whoever was lost may have left half of one
                file.unlink()
            return folder, self.workers[0]

        return next(iter(self.group.all("save", anew).values()))

    def restore_tuner(self, state: dict[str, Any]) -> None:
        self.calls.send(self.workers, "restore_tuner", state)

    def close(self) -> None:
        self.transport.close()
