"""Rewards overlap with decoding: each completion is rewarded in another process as soon as it is finished.

A process can be killed, which is the only way to stop a function that hangs, and it shares no lock with the engine. It
imports the tasks and the user's function and nothing else, so it starts in a moment.
"""

from __future__ import annotations

import pickle
import signal
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from paceline.core import Sample
from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.process.child import Ended, Mailbox, Said
from paceline.tasks.reward_errors import RewardErrors
from paceline.tasks.reward_process import Imported, RewardDone, RewardJob, RewardProcess, RewardResult, try_rewards
from paceline.tasks.rewards import Reward, load_reward

MAX_DEATHS = 3  # of a process in a row without a result in between, before the run stops
POLL = 0.05  # seconds for which a caller that waits lets the processes work before it looks at the clock


class RewardPool:
    """Submit completions, collect results. `functions` are (name, weight) pairs as in the settings, or rewards that are
    Python objects; those run in this process, because no other could import them."""

    def __init__(
        self,
        functions: Sequence[tuple[str, float]] | Sequence[Reward],
        workers: int = 1,
        timeout_s: float = 30.0,
        log: Path | None = None,
        start_timeout_s: float = 120.0,
    ):
        objects = [f for f in functions if isinstance(f, Reward)]
        named = [f for f in functions if not isinstance(f, Reward)]
        self.functions = [(r.name, r.weight) for r in objects] + named
        workers = 0 if objects else workers
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.seconds = 0.0
        """Time that the functions took, whoever waited for it."""
        self.errors = RewardErrors(log)
        self._log = log
        self._waiting: deque[RewardJob] = deque()
        self._killed: set[int] = set()  # ids of requests on which a process was killed once
        self._inline = [*objects, *(load_reward(*f) for f in named)] if workers == 0 else []
        self._results: list[RewardResult] = []
        self._mailbox = Mailbox()
        self._processes = [RewardProcess(self.functions, self._mailbox, log) for _ in range(workers)]

    def ready(self) -> None:
        """Wait until the functions are imported; say so if one cannot be."""
        while not all(process.ready for process in self._processes):
            self._poll(POLL)

    @property
    def open(self) -> int:
        """Completions submitted whose result has not been collected."""
        return len(self._waiting) + len(self._results) + sum(len(p.jobs) for p in self._processes)

    def submit(self, request_id: int, sample: Sample, text: str, tokens: list[int]) -> None:
        job = RewardJob(request_id, sample, text, tokens)
        if self._processes:
            self._waiting.append(job)
            self._feed()
        else:
            started = time.perf_counter()
            self._results.append(try_rewards(self._inline, job))
            self.seconds += time.perf_counter() - started

    def collect(self, block: bool = False) -> list[RewardResult]:
        """Results that are in; with `block`, wait a moment for one."""
        if self._processes:
            self._poll(POLL if block and not self._results else 0.0)
        results = self._results
        self._results = []
        return results

    def _poll(self, seconds: float) -> None:
        for message in self._mailbox.take(seconds):
            process = next(p for p in self._processes if p.child is message.child)
            if isinstance(message, Ended):
                self._ended(process, message.reason)
            elif isinstance(message.message, Imported):
                self._imported(process, message.message)
            else:
                self._done(process, message)
        for process in self._processes:
            self._check_time(process)
        self._feed()

    def _imported(self, process: RewardProcess, message: Imported) -> None:
        if message.problem:
            raise UserError(message.problem)
        process.ready = True

    def _done(self, process: RewardProcess, message: Said) -> None:
        done: RewardDone = message.message
        process.jobs.popleft()
        process.since = message.at
        process.deaths = 0
        self.seconds += done.seconds
        self._results.append(done.result)

    def _check_time(self, process: RewardProcess) -> None:
        now = time.monotonic()
        if not process.ready and now - process.child.started > self.start_timeout_s:
            raise UserError(
                f"importing the reward {self._names} took longer than {self.start_timeout_s:g} s "
                f"(reward.start_timeout_s){self._see_log}"
            )
        if process.jobs and now - process.since > self.timeout_s:
            job = process.jobs.popleft()
            self._blame(job, f"took longer than {self.timeout_s:g} s")
            self._requeue(process)

    def _ended(self, process: RewardProcess, reason: str) -> None:
        code = process.child.how_it_ended()
        how = "was ended" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({_signal_name(-code)})"
        process.deaths += 1
        if not process.ready and (code is None or code >= 0):
            raise UserError(f"the reward process {how} while it was importing the functions{self._see_log}")
        if process.deaths > MAX_DEATHS:
            times = f"{MAX_DEATHS} times in a row"
            raise UserError(f"the process of the reward {self._names} {how}, {times}{self._see_log}")
        if process.jobs:
            # A function that exits does so by itself; one that is killed may be the victim of something else.
            job = process.jobs.popleft()
            if code is not None and code < 0 and job.request_id not in self._killed:
                self._killed.add(job.request_id)
                process.jobs.appendleft(job)
            else:
                again = " twice on the same answer" if job.request_id in self._killed else ""
                self._blame(job, f"ended its process{again}: it {how}" if code is not None else f"{reason}")
        self._requeue(process)

    def _blame(self, job: RewardJob, what: str) -> None:
        self._results.append(RewardResult(job.request_id, error=f"the reward {self._names} {what}"))

    def _requeue(self, process: RewardProcess) -> None:
        """A new process takes over; jobs that the last one had not done go back to the head of the queue."""
        self._waiting.extendleft(reversed(process.jobs))
        process.restart()

    def _feed(self) -> None:
        """Each job goes to the process with the fewest, as long as one can take it."""
        while self._waiting:
            job = self._waiting[0]
            able = [process for process in self._processes if process.ready and process.can_take(len(job.text))]
            if not able:
                return
            self._waiting.popleft()
            try:
                min(able, key=lambda process: len(process.jobs)).send(job)
            except (pickle.PicklingError, TypeError, AttributeError) as err:
                self._blame(job, f"cannot be given the sample's columns: {shorten(str(err))}")

    @property
    def _names(self) -> str:
        return " or ".join(name for name, _ in self.functions)

    @property
    def _see_log(self) -> str:
        return f"; see {self._log}" if self._log else ""

    def close(self) -> None:
        for process in self._processes:
            process.child.close()
        self._processes = []


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
