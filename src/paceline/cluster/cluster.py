"""The driver's side of the workers: it sends the coordinator's orders, has updates made by all together, notices who is
lost and starts them again.

A worker that is lost takes nothing with it: its requests go to the others, what it held of the optimizer's state is
held twice, and whatever was being done together is done again by the rest. It comes back between two steps. An error is
not a loss: it would come again, so it is raised here as `WorkerFailed`, and the run is saved and stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.cluster.coordinator import (
    Assign,
    Done,
    Joined,
    Load,
    Lost,
    Order,
    Release,
    Report,
    RolloutState,
    Train,
    decide,
)
from paceline.cluster.messages import Alive, Call, Failed, Ready, Returned, RolloutMode, RolloutProgress, WorkerSpec
from paceline.cluster.peers import Rendezvous, Store
from paceline.cluster.serve import LOADING
from paceline.cluster.transport import Transport
from paceline.cluster.worker import RolloutOutcome, Shares
from paceline.config import Config
from paceline.core import Completion, Request, Trajectory
from paceline.errors import RunError, UserError, WorkerFailed
from paceline.learn.shards import Holders, deal, place, sources
from paceline.learn.token_sums import mean_metrics
from paceline.learn.update_batch import Score
from paceline.rollout.differences import Difference
from paceline.spot.evaluation import Evaluation
from paceline.spot.trainer import TrainingStats

PATIENCE = 5.0  # seconds in which the loss of a worker that others have noticed is known here
WAITING = 1.5  # times cluster.timeout_s: for one that waits for others, whose own deadline is cluster.timeout_s
GRACE = 0.25  # of cluster.timeout_s: for the rest of a group to notice what one of them has noticed
RETRIES = 1  # of what all do together and fails though nobody was lost, before those who cannot be reached are given up
POLL = 0.05  # seconds for which the driver waits for news before it looks after other things


Calls = dict[int, tuple[str, tuple[Any, ...]]]
"""Worker -> name and arguments."""


class _Broken(Exception):
    """What several were doing together failed: somebody was lost, or they could not reach each other."""

    def __init__(self, reports: Sequence[Failed] = ()):
        super().__init__()
        self.reports = reports

    def reason(self) -> str:
        return "; ".join(sorted({f"worker {r.worker}: {r.error}" for r in self.reports})) or "no reason was given"


class Cluster:
    def __init__(
        self,
        config: Config,
        transport: Transport,
        post: Callable[[int, int], WorkerSpec],
        note: Callable[[str], None],
        backend: str = "gloo",
        on_error: Callable[[str, str], object] = lambda where, trace: None,
    ):
        """`post` makes the post for the given life of a worker; `note` hears of losses; `backend` sums gradients;
        `on_error` keeps tracebacks of errors that do not stop the run."""
        self.config, self.transport, self.note = config, transport, note
        self._post, self._backend = post, backend
        self.on_error = on_error
        n = config.cluster.workers
        self._lives = [1] * n
        self._restarts = [0] * n
        self._living: set[int] = set()  # have said that they are ready, and are not lost
        self.members: tuple[int, ...] = ()
        """Those that decode and learn; one that was started again has to wait for the next step."""
        self._circle: tuple[int, ...] = ()  # those that formed the last one
        self._holders: list[Holders] = []
        self._heard = [0.0] * n
        self._starting: dict[int, float] = {}  # those that are loading, and since when
        self._waits = [False] * n
        self._failed: set[int] = set()  # have raised an error, which was told; what follows from it is not
        self._calls = 0
        self._meetings = 0
        self._store: Store | None = None
        self._facts: Ready | None = None
        self.lost: list[int] = []
        """Workers that were lost, in order."""
        self.missed: dict[int, float] = {}
        """Workers that do not take part at present, and since when by the wall clock."""
        self.absences: list[tuple[int, float, float]] = []
        """Workers that came back: since when they were missed, and until when."""
        self.updating = False
        """Whether the policy is neither what it was before an update nor what it is after it."""
        self.tokens = 0
        """Written in the present rollout."""
        self.writers: dict[int, int] = {}
        """Who wrote each answer."""
        self.decisions: list[tuple[float, Order]] = []
        """Orders of the present rollout, each with its reason, and when they were given."""
        if n > 1:
            self._store = Store(transport.host, config.cluster.port, config.cluster.timeout_s)

    def start(self) -> Ready:
        """Start all workers and wait for them."""
        everybody = tuple(range(len(self._lives)))
        for worker in everybody:
            self._start(worker)
        tries = 0
        while self.members != everybody:
            self._await(everybody)
            self._holders = place(len(everybody), everybody)
            lost = len(self.lost)
            try:
                self._form(everybody)
            except _Broken as err:
                tries += len(self.lost) == lost
                if tries > RETRIES:
                    raise RunError(
                        f"the workers could not meet ({err.reason()}); each must reach all others and the driver at "
                        f"{self.transport.host}, see docs/workers.md"
                    ) from err
        if places := self.transport.places():
            self.note("workers: " + ", ".join(f"{worker} on {place}" for worker, place in sorted(places.items())))
        assert self._facts is not None
        return self._facts

    def _await(self, workers: tuple[int, ...]) -> None:
        """Until all of these are ready. One that dies meanwhile is started again, like any other."""
        while not set(workers) <= self._living:
            self._listen(POLL)
            absent = [w for w in workers if w not in self._living and w not in self._starting]
            if absent:
                raise RunError(
                    f"worker {absent[0]} ended before it was ready, {self._restarts[absent[0]] + 1} times "
                    f"(cluster.restarts); see {self._log}, and go on with: "
                    f"paceline train --resume {self.config.run_dir}"
                )

    def _start(self, worker: int) -> None:
        self.transport.start(self._post(worker, self._lives[worker]))
        self._starting[worker] = time.monotonic()

    # Rollout

    def rollout(
        self, step: int, requests: Sequence[Request], expected: dict[int, float], way: RolloutMode, train: bool
    ) -> Iterator[list[Completion]]:
        """Answers as they are finished, some at a time or none. With `train`, whoever has nothing to decode trains the
        drafter until the last answer is in."""
        self.admit()
        books = RolloutState(len(self._lives), expected, self.config.rollout.samples)
        by_id = {request.id: request for request in requests}
        tokens = [0] * len(self._lives)
        self.decisions, self.tokens = [], 0
        for worker in self.members:
            books.take(Joined(worker, self._lives[worker]))
            self._send(worker, "begin", step, way, train)
        while True:
            for order in decide(books, train):
                self._carry_out(order, by_id)
                books.note(order)
            if books.over:
                return
            done: list[Completion] = []
            for report in self._listen(POLL, [w for w, d in enumerate(books.desks) if d.holds or d.training]):
                if not isinstance(report, RolloutProgress):
                    books.take(report)
                    continue
                for completion in report.completions:
                    if books.take(Done(report.worker, report.life, completion.request.id)):
                        done.append(completion)
                        self.writers[completion.request.id] = report.worker
                books.take(Load(report.worker, report.life, report.waiting))
                tokens[report.worker] = report.tokens
            self.tokens = sum(tokens)
            if not any(desk.alive for desk in books.desks):
                raise self._all_lost()
            yield done

    def _carry_out(self, order: Order, requests: dict[int, Request]) -> None:
        self.decisions.append((time.time(), order))
        if isinstance(order, Assign):
            self._send(order.worker, "assign", [requests[i] for i in order.requests])
        elif isinstance(order, Release):
            self._send(order.worker, "release", order.count)
        else:
            self._send(order.worker, "train" if isinstance(order, Train) else "stop")

    def end(self) -> dict[int, RolloutOutcome]:
        """What the rollout came to, worker by worker."""
        return self._all("end")

    def clear(self) -> None:
        """Give up the rollout that is going on."""
        for worker in self.members:
            self._send(worker, "clear")

    def explain(self, pairs: list[tuple[Completion, Completion]]) -> list[Difference]:
        """Why answers to the same requests differ, if any do."""
        if not pairs:
            return []
        return next(iter(self._until_done(lambda: {self.members[0]: ("explain", (pairs,))}).values()))

    # Learning

    def update(self, answers: list[Trajectory], step: int) -> dict[str, float]:
        """One step of learning, by all together."""
        scores = self._scores(answers)
        done, updates, work = next(iter(self._all("teach", lambda: (answers, step, scores)).values()))
        metrics = []
        for update, members in enumerate(updates):
            self._all("gradients", lambda u=update, m=members: (u, self._shares(work, m)))  # type: ignore[misc]
            self.updating = True
            applied = self._all("apply", lambda u=update: (u, done + u))  # type: ignore[misc]
            metrics.append(next(iter(applied.values())))
        self.updating = False
        return mean_metrics(metrics)

    def _scores(self, answers: list[Trajectory]) -> list[Score]:
        scores = [Score(None, None)] * len(answers)
        c = self.config.learn
        if c.epochs * c.minibatches == 1 and not c.kl_coef:
            return scores
        lengths, everything = [a.length for a in answers], list(range(len(answers)))
        replies = self._all("score", lambda: (answers, self._shares(lengths, everything)))
        for worker, share in self._shares(lengths, everything).items():
            for i, score in zip(share, replies[worker], strict=True):
                scores[i] = score
        return scores

    def _shares(self, work: list[int], members: list[int]) -> Shares:
        """Who looks at which of these answers, if each is so much work."""
        shares = deal([work[i] for i in members], len(self.members))
        return {w: [members[i] for i in share] for w, share in zip(self.members, shares, strict=True)}

    # The drafter

    def spend(self, seconds: float) -> TrainingStats:
        """Have everybody train the drafter for so long -> what was trained since the rollout began."""
        spells = list(self._all("spend", lambda: (seconds,)).values())
        return sum(spells[1:], spells[0])

    def merge(self) -> Evaluation | None:
        """Make the next version from the drafters of all that trained; all take it if it is not worse. None if nobody
        trained, or if there is nothing to judge by: then training goes on, and the next time decides."""
        verdict: Evaluation | None = next(iter(self._all("merge").values()))
        if verdict is None or not verdict.tokens:
            return None
        self._all("settle", lambda: (verdict,))
        return verdict

    # Checkpoints

    def save(self, folder: Path) -> dict[str, Any]:
        """Have a checkpoint written -> what the first worker's tuner knows. A worker that cannot do its part is given
        up if others can do it."""
        while True:
            try:
                return self._save(folder)
            except WorkerFailed as err:
                if not self._can_do_without(err.worker):
                    raise
                self._give_up(err.worker, f"could not save its part ({err})", again=False)

    def _save(self, folder: Path) -> dict[str, Any]:
        folder = folder.resolve()  # actors have a working directory of their own

        def anew() -> tuple[Path, int]:
            for file in folder.glob("learner-*"):  # whoever was lost may have left half of one
                file.unlink()
            return folder, self.members[0]

        return next(iter(self._all("save", anew).values()))

    def restore_tuner(self, state: dict[str, Any]) -> None:
        for worker in self.members:
            self._send(worker, "restore_tuner", state)

    # Coming and going

    def admit(self) -> None:
        """Take in workers that were started again and are ready by now."""
        self._listen(0.0)
        if set(self.members) != self._living:
            self._regroup(tuple(sorted(self._living)))

    def _regroup(self, members: tuple[int, ...]) -> None:
        """Form a process group of these, or of those of them that are not lost or given up on the way. One that is lost
        and back before the group stands is another life: it knows nothing of what the others are in the middle of, and
        has to wait."""
        wanted = [(w, self._lives[w]) for w in members]
        tries = 0
        while True:
            if not set(members) & set(self.members):
                raise self._all_lost()
            lost = len(self.lost)
            try:
                return self._form(members)
            except _Broken as err:
                if len(self.lost) == lost:
                    tries += 1
                    self._after_failure(err, tries, members)
                members = tuple(w for w, life in wanted if w in self._living and self._lives[w] == life)

    def _after_failure(self, err: _Broken, tries: int, members: tuple[int, ...]) -> None:
        """These could not work together though nobody was lost: have it tried again, or give up those who cannot be
        reached. If the rest could not go on without them, or nobody knows who it is, the run stops."""
        if tries <= RETRIES:
            self.note(f"workers {_listed(members)} could not work together ({err.reason()}); trying again")
            return None
        blamed = [w for report in err.reports for w in report.unreachable if w in members]
        newcomers = [w for w in blamed if w not in self.members]
        suspects = sorted(set(newcomers or blamed), key=lambda w: (-blamed.count(w), -w))
        for worker in suspects:
            if worker in newcomers or self._can_do_without(worker):
                return self._give_up(worker, f"cannot be reached by others ({err.reason()})")
        raise WorkerFailed(
            err.reports[0].worker if err.reports else members[0],
            f"workers {_listed(members)} could not work together, {tries} times in a row ({err.reason()})",
            "\n".join(report.trace for report in err.reports),
        )

    def _can_do_without(self, worker: int) -> bool:
        """Whether the others have all that it has."""
        rest = tuple(w for w in self.members if w != worker)
        holders = [tuple(w for w in holders if w in rest) for holders in self._holders]
        return bool(rest) and None not in sources(holders, rest)

    def _give_up(self, worker: int, why: str, again: bool = True) -> None:
        """Do without a worker that is there, from now on."""
        self.note(f"worker {worker} {why}; it is given up")
        self.transport.kill(worker)
        self._lose(worker, again)

    def _form(self, members: tuple[int, ...]) -> None:
        veterans = tuple(w for w in self.members if w in members) or members  # at first nobody is new
        newcomers = tuple(w for w in members if w not in veterans)
        before = [tuple(w for w in holders if w in veterans) for holders in self._holders]
        if None in sources(before, members):
            raise self._all_lost()
        self._meetings += 1
        port = self._store.port if self._store else 0
        c = self.config.cluster
        meeting = Rendezvous(self.transport.host, port, self._meetings, members, self._backend, c.timeout_s)
        self._each(dict.fromkeys(members, ("join", (meeting, newcomers, before))))
        self.members = self._circle = members
        self._holders = place(len(self._lives), members)
        for worker in set(self.missed) & set(members):
            self.absences.append((worker, self.missed.pop(worker), time.time()))
        for worker in members:
            self._send(worker, "joined")

    @property
    def _log(self) -> str:
        """Where workers' own words are."""
        return "Ray's logs" if self.config.cluster.backend == "ray" else f"{self.config.run_dir}/workers.log"

    def _all_lost(self) -> RunError:
        folder = self.config.run_dir
        return RunError(
            f"so many workers were lost at once ({', '.join(map(str, self.lost[-4:]))}) that the state of the run went "
            f"with them; see {self._log}, and go on from the last checkpoint with: "
            f"paceline train --resume {folder}"
        )

    # Talking

    def _send(self, worker: int, name: str, *args: Any) -> None:
        self._heard[worker] = time.monotonic()
        self.transport.send(worker, Call(name, args))

    def _all(self, name: str, make_args: Callable[[], tuple[Any, ...]] = tuple) -> dict[int, Any]:
        """Have all members do the same."""
        return self._until_done(lambda: {w: (name, make_args()) for w in self.members})

    def _until_done(self, calls: Callable[[], Calls]) -> dict[int, Any]:
        """Have members do something. If one is lost meanwhile, the rest does it again: every call allows that. `calls`
        is asked anew then, because it depends on who there is."""
        tries = 0
        while True:
            if self.members != self._circle:
                self._regroup(self.members)
            lost = len(self.lost)
            try:
                return self._each(calls())
            except _Broken as err:
                if len(self.lost) == lost:
                    tries += 1
                    self._after_failure(err, tries, self.members)
                self._regroup(self.members)

    def _each(self, calls: Calls) -> dict[int, Any]:
        """Call these workers and wait for what they return. Raises _Broken if one of them is lost."""
        numbers: dict[int, int] = {}
        for worker, (name, args) in calls.items():
            self._calls += 1
            numbers[worker] = self._calls
            self._heard[worker], self._waits[worker] = time.monotonic(), False
            self.transport.send(worker, Call(name, args, self._calls))
        values: dict[int, Any] = {}
        failures: list[Failed] = []
        lost = len(self.lost)
        open_calls = {w for w in calls if w in self._living}
        broken = len(open_calls) < len(calls)
        while open_calls:
            for report in self._listen(POLL, sorted(open_calls)):
                if isinstance(report, Lost) and report.worker in calls:
                    open_calls.discard(report.worker)
                    broken = True
                elif isinstance(report, Returned) and report.call == numbers.get(report.worker):
                    values[report.worker] = report.value
                    open_calls.discard(report.worker)
                elif isinstance(report, Failed) and report.call == numbers.get(report.worker):
                    open_calls.discard(report.worker)
                    failures.append(report)
                    if len(failures) == 1:
                        self._hurry(open_calls)
        if broken or failures:
            # Those that waited for a lost worker may hear of it before the driver does.
            end = time.monotonic() + PATIENCE
            while len(self.lost) == lost and time.monotonic() < end:
                self._listen(POLL)
            raise _Broken(failures)
        return values

    def _hurry(self, workers: set[int]) -> None:
        """One of a group has noticed that it is broken: the others do so soon, or they hang."""
        limit = self.config.cluster.timeout_s
        for worker in workers:
            self._waits[worker] = False
            self._heard[worker] = time.monotonic() - (1 - GRACE) * limit

    def _listen(self, seconds: float, expected: Sequence[int] = ()) -> list[Report]:
        """What the living say, less what is only for here. `expected` are those that should say something."""
        out: list[Report] = []
        for report in self.transport.receive(seconds):
            worker = report.worker
            if report.life != self._lives[worker]:
                continue
            self._heard[worker] = time.monotonic()
            self._waits[worker] = isinstance(report, Alive) and report.waits
            if isinstance(report, Failed) and report.kind != "peer":
                self._take_failure(report)
                continue
            if isinstance(report, Ready):
                self._living.add(worker)
                self._starting.pop(worker, None)
                self._facts = report
            elif isinstance(report, Lost):
                self._lose(worker)
                out.append(report)
            elif not isinstance(report, Alive):
                out.append(report)
        return out + self._find_silent(expected)

    def _find_silent(self, expected: Sequence[int]) -> list[Report]:
        """Those that have something to do and say nothing, or take too long to load, are lost from now on."""
        c, now = self.config.cluster, time.monotonic()
        out: list[Report] = []
        for worker in expected:
            silence = now - self._heard[worker]
            limit = c.timeout_s * (WAITING if self._waits[worker] else 1.0)
            if worker in self._living and silence > limit:
                out.append(Lost(worker, self._lives[worker]))
                self._give_up(worker, f"has said nothing for {silence:.0f} s (cluster.timeout_s)")
        for worker, since in list(self._starting.items()):
            if now - since > c.start_timeout_s:
                self._give_up(worker, f"was not ready after {now - since:.0f} s (cluster.start_timeout_s)")
        return out

    def _take_failure(self, report: Failed) -> None:
        """An error in a worker stops the run; but one that was started again and cannot load is done without."""
        worker = report.worker
        if report.doing == LOADING and self.members:
            self.on_error(f"worker {worker}, {report.doing}", report.trace)
            self._give_up(worker, f"cannot be started again: {report.error}", again=False)
            return
        if worker in self._failed and report.call is None:
            return  # it was told that something went wrong before, and what comes of that is known
        self._failed.add(worker)
        if report.kind == "user" and not self.members:
            raise UserError(report.error)
        if report.kind == "disk":
            raise OSError(report.error)
        raise WorkerFailed(worker, f"worker {worker} failed in {report.doing}: {report.error}", report.trace)

    def _lose(self, worker: int, again: bool = True) -> None:
        self.lost.append(worker)
        self._living.discard(worker)
        self._failed.discard(worker)
        self._starting.pop(worker, None)
        self._lives[worker] += 1  # whatever its former life still says is not believed
        self.members = tuple(w for w in self.members if w != worker)
        self.missed.setdefault(worker, time.time())
        again = again and self._restarts[worker] < self.config.cluster.restarts
        self.note(
            f"worker {worker} was lost"
            + ("; the others go on" if self.members else "")
            + ("; it is started again" if again else "; it is not started again (cluster.restarts)")
        )
        if again:
            self._restarts[worker] += 1
            self._start(worker)

    def close(self) -> None:
        self.transport.close()


def _listed(workers: Sequence[int]) -> str:
    return ", ".join(map(str, workers))
