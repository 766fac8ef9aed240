"""One reward process: what it is sent and what it replies, and the completions that it has been given.

`RewardPool` owns some of these; the program that runs in them is `reward_worker`.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core import Sample
from paceline.files.reading import shorten
from paceline.process.child import Child, Mailbox
from paceline.tasks.reward_errors import MAX_TRACE, BadReward, where_raised
from paceline.tasks.rewards import Reward, compute_rewards

MAX_JOBS = 32  # completions that a process is sent ahead, so that it never waits for the engine's next round
MAX_JOB_CHARS = 2**22  # characters of those: one completion may have a million
MAX_REPLY = 2**20  # bytes of one message from a process
MAX_ERROR = 400  # characters of what a function raised or returned


@dataclass
class RewardJob:
    """A finished completion to be rewarded."""

    request_id: int
    sample: Sample
    text: str
    tokens: list[int]


@dataclass
class RewardResult:
    request_id: int
    values: dict[str, float] = field(default_factory=dict)
    """By the name of the reward function, unweighted."""
    error: str | None = None
    """What went wrong, naming the function, and the line if it raised."""
    kind: str = ""
    """Equal for errors of the same cause."""
    trace: str = ""
    """The traceback, if the function raised."""


@dataclass(frozen=True)
class Imported:
    """A process has imported the functions, or says why it cannot."""

    problem: str | None


@dataclass(frozen=True)
class RewardDone:
    result: RewardResult
    seconds: float


class RewardProcess:
    """A child that runs rewards, and the jobs that it has been sent and not replied to."""

    def __init__(self, functions: list[tuple[str, float]], mailbox: Mailbox, log: Path | None):
        self.functions = functions
        self.mailbox = mailbox
        self.log = log
        self.deaths = 0
        """In a row, without a result in between."""
        self._start()

    def _start(self) -> None:
        self.jobs: deque[RewardJob] = deque()
        self.since = 0.0
        """When the first of `jobs` was begun (`time.monotonic`)."""
        self.ready = False
        self.child = Child("paceline.tasks.reward_worker", self.mailbox, self.log, guarded=True, limit=MAX_REPLY)
        self.child.send(self.functions)

    def restart(self) -> None:
        self.child.close()
        self._start()

    def can_take(self, chars: int) -> bool:
        """Whether it can be sent another completion of so many characters ahead."""
        sent = sum(len(job.text) for job in self.jobs)
        return not self.jobs or (len(self.jobs) < MAX_JOBS and sent + chars <= MAX_JOB_CHARS)

    def send(self, job: RewardJob) -> None:
        """Raises what pickle raises if the sample's columns cannot be sent."""
        if not self.jobs:
            self.since = time.monotonic()
        self.child.send(job)
        self.jobs.append(job)


def try_rewards(rewards: list[Reward], job: RewardJob) -> RewardResult:
    """Call the reward functions; whatever a user's function does wrong becomes part of the result."""
    values: dict[str, float] = {}
    for reward in rewards:
        try:
            values |= compute_rewards([reward], job.sample, job.text, job.tokens)
        except (Exception, SystemExit) as err:  # noqa: BLE001 (the user's code: it is reported in the result)
            return _failed(job, reward.name, err)
    return RewardResult(job.request_id, values)


def _failed(job: RewardJob, name: str, err: BaseException) -> RewardResult:
    message = shorten(_text_of(err), MAX_ERROR)
    if isinstance(err, BadReward):
        return RewardResult(job.request_id, error=f"the reward {name} {message}", kind=f"{name} {message[:40]}")
    where = where_raised(err.__traceback__)
    at = f" (at {where})" if where else ""
    error = f"the reward {name} raised {type(err).__name__}: {message}{at}"
    trace = "".join(traceback.format_exception(err))[-MAX_TRACE:]
    return RewardResult(job.request_id, error=error, kind=f"{name} {type(err).__name__} {where}", trace=trace)


def _text_of(err: BaseException) -> str:
    try:
        return str(err)
    except Exception as second:  # noqa: BLE001 (a user's exception may fail to say what it is)
        return f"(its text cannot be shown: {type(second).__name__})"
