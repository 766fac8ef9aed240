"""Rewards beside decoding: answers are judged in processes of their own as soon as they are finished.

A process can be killed, which is the only way to stop a function that hangs, and it shares no lock with the engine. It
imports the tasks and the user's function and nothing else, so it starts in a moment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.tasks.rewards import Reward, judge, load_reward
from paceline.tasks.sample import Sample

IN_FLIGHT = 32  # answers handed to a process ahead, so that it does not wait for the engine's next step


@dataclass
class Verdict:
    ticket: int
    values: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    """What went wrong, naming the function."""


@dataclass
class Job:
    ticket: int
    sample: Sample
    text: str
    tokens: list[int]


class Judge:
    """Hand in answers, collect verdicts. `functions` are (name, weight) pairs as in the settings, or rewards that are
    there already; those run in this process, because no other could import them."""

    def __init__(
        self,
        functions: Sequence[tuple[str, float]] | Sequence[Reward],
        workers: int = 1,
        timeout_s: float = 30.0,
        log: Path | None = None,
    ):
        here = [f for f in functions if isinstance(f, Reward)]
        named = [f for f in functions if not isinstance(f, Reward)]
        self.functions = [(r.name, r.weight) for r in here] + named
        workers = 0 if here else workers
        self.timeout_s = timeout_s
        self.seconds = 0.0
        """Time that the functions took, whoever waited for it."""
        self._waiting: deque[Job] = deque()
        self._inline = [*here, *(load_reward(*f) for f in named)] if workers == 0 else []
        self._done: list[Verdict] = []
        self._workers = [_Worker(self.functions, log) for _ in range(workers)]

    def ready(self) -> None:
        """Wait until the functions are imported; say so if one cannot be."""
        for worker in self._workers:
            worker.ready()

    @property
    def open(self) -> int:
        """Answers handed in whose verdict has not been collected."""
        return len(self._waiting) + len(self._done) + sum(len(w.jobs) for w in self._workers)

    def submit(self, ticket: int, sample: Sample, text: str, tokens: list[int]) -> None:
        job = Job(ticket, sample, text, tokens)
        if self._workers:
            self._waiting.append(job)
            self._feed()
        else:
            started = time.perf_counter()
            self._done.append(try_judge(self._inline, job))
            self.seconds += time.perf_counter() - started

    def collect(self, block: bool = False) -> list[Verdict]:
        """Verdicts that are in; with `block`, wait until there is at least one, if any is open."""
        while True:
            self._poll(0.05 if block else 0.0)
            done, self._done = self._done, []
            if done or not block or not self.open:
                return done

    def _poll(self, seconds: float) -> None:
        if not self._workers:
            return
        if seconds:
            wait([w.results for w in self._workers], seconds)
        for worker in self._workers:
            try:
                while worker.jobs and worker.results.poll():
                    verdict, took = worker.results.recv()
                    self.seconds += took
                    worker.jobs.popleft()
                    worker.started = time.monotonic()
                    self._done.append(verdict)
            except (EOFError, ConnectionResetError):
                self._lose(worker, "ended its process")
                continue
            if worker.jobs and time.monotonic() - worker.started > self.timeout_s:
                self._lose(worker, f"took longer than {self.timeout_s:g} s")
        self._feed()

    def _lose(self, worker: _Worker, what: str) -> None:
        """The job at the head did it; the others go back to the queue, and a new process takes over."""
        worker.stop()
        if worker.jobs:
            job = worker.jobs.popleft()
            names = " or ".join(name for name, _ in self.functions)
            self._done.append(Verdict(job.ticket, error=f"the reward {names} {what}"))
        self._waiting.extendleft(reversed(worker.jobs))
        worker.start()
        worker.ready()

    def _feed(self) -> None:
        for worker in self._workers:
            while self._waiting and len(worker.jobs) < IN_FLIGHT:
                if not worker.jobs:
                    worker.started = time.monotonic()
                job = self._waiting.popleft()
                worker.jobs.append(job)
                try:
                    worker.orders.send(job)
                except BrokenPipeError:  # its process has ended
                    worker.jobs.pop()
                    self._waiting.appendleft(job)
                    if worker.jobs:
                        break  # `_poll` finds that out too, and whose fault it was
                    self._lose(worker, "ended its process")

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []


def try_judge(rewards: list[Reward], job: Job) -> Verdict:
    """Judge an answer; whatever a user's function does wrong becomes part of the verdict, not of the program."""
    values: dict[str, float] = {}
    for reward in rewards:
        try:
            values |= judge([reward], job.sample, job.text, job.tokens)
        except (Exception, SystemExit) as err:  # noqa: BLE001 (the user's code: it is told in the verdict)
            kind = "" if type(err).__name__ == "BadReward" else f"raised {type(err).__name__}: "
            return Verdict(job.ticket, error=f"the reward {reward.name} {kind}{err}")
    return Verdict(job.ticket, values)


class _Worker:
    """A reward process and the two pipes to it."""

    def __init__(self, functions: list[tuple[str, float]], log: Path | None):
        self.functions, self.log = functions, log
        self.start()

    def start(self) -> None:
        self.jobs: deque[Job] = deque()
        self.started = 0.0
        orders_read, orders_write = os.pipe()
        results_read, results_write = os.pipe()
        self.orders = Connection(orders_write, readable=False)
        self.results = Connection(results_read, writable=False)
        output: Any = open(self.log, "ab") if self.log else subprocess.DEVNULL  # noqa: SIM115
        command = [sys.executable, "-m", "paceline.tasks.reward_worker", str(orders_read), str(results_write)]
        self.process = subprocess.Popen(
            command,
            pass_fds=(orders_read, results_write),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        if self.log:
            output.close()
        os.close(orders_read)
        os.close(results_write)
        self.orders.send(self.functions)

    def ready(self) -> None:
        try:
            problem = self.results.recv()
        except EOFError as err:
            where = f"; see {self.log}" if self.log else ""
            raise UserError(f"the reward process ended while it was importing the functions{where}") from err
        if problem:
            raise UserError(problem)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.orders.close()
        self.results.close()
