"""Rewards beside decoding: answers are judged in processes of their own as soon as they are finished.

A process can be killed, which is the only way to stop a function that hangs, and it shares no lock with the engine. It
imports the tasks and the user's function and nothing else, so it starts in a moment.
"""

from __future__ import annotations

import pickle
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core import Sample
from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.process.child import Child, Ended, Mailbox, Said
from paceline.tasks.rewards import Reward, compute_rewards, load_reward

IN_FLIGHT = 32  # answers handed to a process ahead, so that it does not wait for the engine's next step
IN_FLIGHT_CHARS = 2**22  # of their texts: one answer may have a million
MAX_VERDICT = 2**20  # bytes: what a process may say at once
MAX_ERROR = 400  # characters of what a function raised or returned
DEATHS = 3  # of a process in a row without a verdict in between, before the run stops
POLL = 0.05  # seconds for which a caller that waits lets the processes work before it looks at the clock


@dataclass
class RewardResult:
    ticket: int
    values: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    """What went wrong, naming the function."""


@dataclass
class RewardJob:
    ticket: int
    sample: Sample
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Imported:
    """A process has imported the functions, or says why it cannot."""

    problem: str | None


@dataclass(frozen=True)
class RewardDone:
    verdict: RewardResult
    seconds: float


class RewardPool:
    """Hand in answers, collect verdicts. `functions` are (name, weight) pairs as in the settings, or rewards that are
    there already; those run in this process, because no other could import them."""

    def __init__(
        self,
        functions: Sequence[tuple[str, float]] | Sequence[Reward],
        workers: int = 1,
        timeout_s: float = 30.0,
        log: Path | None = None,
        start_timeout_s: float = 120.0,
    ):
        here = [f for f in functions if isinstance(f, Reward)]
        named = [f for f in functions if not isinstance(f, Reward)]
        self.functions = [(r.name, r.weight) for r in here] + named
        workers = 0 if here else workers
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.seconds = 0.0
        """Time that the functions took, whoever waited for it."""
        self._log = log
        self._waiting: deque[RewardJob] = deque()
        self._killed: set[int] = set()  # tickets on which a process was killed once
        self._inline = [*here, *(load_reward(*f) for f in named)] if workers == 0 else []
        self._done: list[RewardResult] = []
        self._mailbox = Mailbox()
        self._processes = [_Process(self.functions, self._mailbox, log) for _ in range(workers)]

    def ready(self) -> None:
        """Wait until the functions are imported; say so if one cannot be."""
        while not all(process.ready for process in self._processes):
            self._poll(POLL)

    @property
    def open(self) -> int:
        """Answers handed in whose verdict has not been collected."""
        return len(self._waiting) + len(self._done) + sum(len(p.jobs) for p in self._processes)

    def submit(self, ticket: int, sample: Sample, text: str, tokens: list[int]) -> None:
        job = RewardJob(ticket, sample, text, tokens)
        if self._processes:
            self._waiting.append(job)
            self._feed()
        else:
            started = time.perf_counter()
            self._done.append(try_rewards(self._inline, job))
            self.seconds += time.perf_counter() - started

    def collect(self, block: bool = False) -> list[RewardResult]:
        """Verdicts that are in; with `block`, wait a moment for one."""
        if self._processes:
            self._poll(POLL if block and not self._done else 0.0)
        done = self._done
        self._done = []
        return done

    def drop(self) -> None:
        """Forget all answers that were handed in: nobody wants their verdicts any more."""
        self._waiting.clear()
        self._done.clear()
        for process in self._processes:
            if process.jobs:
                process.restart()

    def _poll(self, seconds: float) -> None:
        for news in self._mailbox.take(seconds):
            process = next(p for p in self._processes if p.child is news.child)
            if isinstance(news, Ended):
                self._ended(process, news.reason)
            elif isinstance(news.message, Imported):
                self._imported(process, news.message)
            else:
                self._judged(process, news)
        for process in self._processes:
            self._check_time(process)
        self._feed()

    def _imported(self, process: _Process, news: Imported) -> None:
        if news.problem:
            raise UserError(news.problem)
        process.ready = True

    def _judged(self, process: _Process, news: Said) -> None:
        judged = news.message
        process.jobs.popleft()
        process.since = news.at
        process.deaths = 0
        self.seconds += judged.seconds
        self._done.append(judged.verdict)

    def _check_time(self, process: _Process) -> None:
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

    def _ended(self, process: _Process, reason: str) -> None:
        code = process.child.how_it_ended()
        how = "was ended" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({_signal_name(-code)})"
        process.deaths += 1
        if not process.ready and (code is None or code >= 0):
            raise UserError(f"the reward process {how} while it was importing the functions{self._see_log}")
        if process.deaths > DEATHS:
            raise UserError(f"the process of the reward {self._names} {how}, {DEATHS} times in a row{self._see_log}")
        if process.jobs:
            # A function that exits does so by itself; one that is killed may be the victim of something else.
            job = process.jobs.popleft()
            if code is not None and code < 0 and job.ticket not in self._killed:
                self._killed.add(job.ticket)
                process.jobs.appendleft(job)
            else:
                again = " twice on the same answer" if job.ticket in self._killed else ""
                self._blame(job, f"ended its process{again}: it {how}" if code is not None else f"{reason}")
        self._requeue(process)

    def _blame(self, job: RewardJob, what: str) -> None:
        self._done.append(RewardResult(job.ticket, error=f"the reward {self._names} {what}"))

    def _requeue(self, process: _Process) -> None:
        """A new process takes over; what the last one had not judged goes back to the head of the queue."""
        self._waiting.extendleft(reversed(process.jobs))
        process.restart()

    def _feed(self) -> None:
        """Each answer goes to the process with the fewest, as long as one has room."""
        while self._waiting:
            job = self._waiting[0]
            able = [process for process in self._processes if process.ready and process.room(len(job.text))]
            if not able:
                return
            self._waiting.popleft()
            self._give(min(able, key=lambda process: len(process.jobs)), job)

    def _give(self, process: _Process, job: RewardJob) -> None:
        if not process.jobs:
            process.since = time.monotonic()
        try:
            process.child.send(job)
        except (pickle.PicklingError, TypeError, AttributeError) as err:
            self._blame(job, f"cannot be given the sample's columns: {shorten(str(err))}")
        else:
            process.jobs.append(job)

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


def try_rewards(rewards: list[Reward], job: RewardJob) -> RewardResult:
    """Judge an answer; whatever a user's function does wrong becomes part of the verdict, not of the program."""
    values: dict[str, float] = {}
    for reward in rewards:
        try:
            values |= compute_rewards([reward], job.sample, job.text, job.tokens)
        except (Exception, SystemExit) as err:  # noqa: BLE001 (the user's code: it is told in the verdict)
            kind = "" if type(err).__name__ == "BadReward" else f"raised {type(err).__name__}: "
            return RewardResult(job.ticket, error=f"the reward {reward.name} {kind}{shorten(_text_of(err), MAX_ERROR)}")
    return RewardResult(job.ticket, values)


def _text_of(err: BaseException) -> str:
    try:
        return str(err)
    except Exception as second:  # noqa: BLE001 (a user's exception may fail to say what it is)
        return f"(its text cannot be shown: {type(second).__name__})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


class _Process:
    """A reward process and the answers that it has been given."""

    def __init__(self, functions: list[tuple[str, float]], mailbox: Mailbox, log: Path | None):
        self.functions = functions
        self.mailbox = mailbox
        self.log = log
        self.deaths = 0
        self._start()

    def _start(self) -> None:
        self.jobs: deque[RewardJob] = deque()
        self.since = 0.0
        self.ready = False
        self.child = Child("paceline.tasks.reward_worker", self.mailbox, self.log, guarded=True, limit=MAX_VERDICT)
        self.child.send(self.functions)

    def restart(self) -> None:
        self.child.close()
        self._start()

    def room(self, chars: int) -> bool:
        """Whether it can be given another answer of so many characters ahead."""
        given = sum(len(job.text) for job in self.jobs)
        return not self.jobs or (len(self.jobs) < IN_FLIGHT and given + chars <= IN_FLIGHT_CHARS)
