"""The workers that do things together: they meet in process groups, and what one group could not finish because a
worker was lost is done again by the rest.

A lost worker takes nothing with it: what it held of the optimizer's state is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.cluster.calls import Broken, Calls, Named
from paceline.cluster.rendezvous import Rendezvous, Store
from paceline.errors import RunError, WorkerFailed
from paceline.learn.shards import Holders, assign_holders, sources

if TYPE_CHECKING:
    from paceline.cluster.liveness import Liveness
    from paceline.config import Config

RETRIES = 1  # of what all do together and fails though nobody was lost, before those who cannot be reached are given up


class WorkerGroup:
    def __init__(self, config: Config, liveness: Liveness, calls: Calls, backend: str):
        """`backend` is what sums gradients: gloo or nccl."""
        self.config = config
        self.liveness = liveness
        self.calls = calls
        self._backend = backend
        self._host = calls.transport.host
        self._holders: list[Holders] = []
        """For each slot of the optimizer's state the workers that hold it."""
        self._formed = 0
        """Process groups so far."""
        c = config.cluster
        self._store = Store(self._host, c.port, c.timeout_s) if c.workers > 1 else None

    @property
    def workers(self) -> tuple[int, ...]:
        return self.liveness.workers

    # Doing things together

    def all(self, name: str, make_args: Callable[[], tuple[Any, ...]] = tuple) -> dict[int, Any]:
        """Have all workers do the same."""
        return self.until_done(lambda: dict.fromkeys(self.workers, (name, make_args())))

    def until_done(self, calls: Callable[[], dict[int, Named]]) -> dict[int, Any]:
        """Have workers do something. If one is lost meanwhile, the rest does it again: every call allows that. `calls`
        is asked anew then, because it depends on who there is."""
        tries = 0
        while True:
            if self.workers != tuple(self.liveness.group):
                self._regroup(self.workers)
            lost = len(self.liveness.lost)
            try:
                return self.calls.each(calls())
            except Broken as err:
                if len(self.liveness.lost) == lost:
                    tries += 1
                    self._after_failure(err, tries, self.workers)
                self._regroup(self.workers)

    # Meeting

    def start(self) -> None:
        """Start all workers and have them meet."""
        everybody = tuple(range(self.config.cluster.workers))
        for worker in everybody:
            self.liveness.start(worker)
        tries = 0
        while self.workers != everybody:
            self.liveness.await_all()
            self._holders = assign_holders(len(everybody), everybody)
            lost = len(self.liveness.lost)
            try:
                self._form(everybody)
            except Broken as err:
                tries += len(self.liveness.lost) == lost
                if tries > RETRIES:
                    raise RunError(
                        f"the workers could not meet ({err.reason()}); each must reach all others and the driver at "
                        f"{self._host}, see docs/workers.md"
                    ) from err

    def admit(self) -> None:
        """Take in workers that were started again and are ready by now."""
        self.liveness.listen(0.0)
        if set(self.workers) != self.liveness.living:
            self._regroup(tuple(sorted(self.liveness.living)))

    def _regroup(self, workers: tuple[int, ...]) -> None:
        """Form a process group of these, or of those of them that are not lost or given up on the way. One that is lost
        and back before the group stands is another generation: it knows nothing of what the others are in the middle
        of, and has to wait."""
        liveness = self.liveness
        wanted = [(w, liveness.generation(w)) for w in workers]
        tries = 0
        while True:
            if not set(workers) & set(self.workers):
                raise liveness.all_lost()
            lost = len(liveness.lost)
            try:
                return self._form(workers)
            except Broken as err:
                if len(liveness.lost) == lost:
                    tries += 1
                    self._after_failure(err, tries, workers)
                workers = tuple(w for w, g in wanted if w in liveness.living and liveness.generation(w) == g)

    def _form(self, workers: tuple[int, ...]) -> None:
        veterans = tuple(w for w in self.workers if w in workers) or workers  # at first nobody is new
        newcomers = tuple(w for w in workers if w not in veterans)
        before = [tuple(w for w in holders if w in veterans) for holders in self._holders]
        if None in sources(before, workers):
            raise self.liveness.all_lost()
        self._formed += 1
        port = self._store.port if self._store else 0
        timeout_s = self.config.cluster.timeout_s
        rendezvous = Rendezvous(self._host, port, self._formed, workers, self._backend, timeout_s)
        self.calls.each(dict.fromkeys(workers, ("join", (rendezvous, newcomers, before))))
        self.liveness.form(workers)
        self._holders = assign_holders(self.config.cluster.workers, workers)
        self.calls.send(workers, "joined")

    # When it fails though nobody was lost

    def _after_failure(self, err: Broken, tries: int, workers: tuple[int, ...]) -> None:
        """These could not work together though nobody was lost: have it tried again, or give up those who cannot be
        reached. If the rest could not go on without them, or nobody knows who it is, the run stops."""
        if tries <= RETRIES:
            self.liveness.note(f"workers {_listed(workers)} could not work together ({err.reason()}); trying again")
            return None
        blamed = [w for report in err.reports for w in report.unreachable if w in workers]
        newcomers = [w for w in blamed if w not in self.workers]
        suspects = sorted(set(newcomers or blamed), key=lambda w: (-blamed.count(w), -w))
        for worker in suspects:
            if worker in newcomers or self.can_do_without(worker):
                return self.liveness.give_up(worker, f"cannot be reached by others ({err.reason()})")
        raise WorkerFailed(
            err.reports[0].worker if err.reports else workers[0],
            f"workers {_listed(workers)} could not work together, {tries} times in a row ({err.reason()})",
            "\n".join(report.trace for report in err.reports),
        )

    def can_do_without(self, worker: int) -> bool:
        """Whether the others have all that it has."""
        rest = tuple(w for w in self.workers if w != worker)
        holders = [tuple(w for w in holders if w in rest) for holders in self._holders]
        return bool(rest) and None not in sources(holders, rest)


def _listed(workers: Sequence[int]) -> str:
    return ", ".join(map(str, workers))
