"""One reward process: what it is sent and what it replies, and the calls that it has been given.

`RewardPool` owns some of these; the program that runs in them is `reward_worker`.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.files.reading import shorten
from paceline.process.child import Child, Mailbox
from paceline.tasks.reward_call import MeanOf, Per, RewardCall, RewardLog
from paceline.tasks.reward_errors import MAX_TRACE, BadReward, where_raised
from paceline.tasks.rewards import Reward, compute_rewards

MAX_JOBS = 32  # calls that a process is sent ahead, so that it never waits for the engine's next round
MAX_JOB_CHARS = 2**22  # characters of those: one completion may have a million
MAX_REPLY = 2**24  # bytes of one message from a process: all that a call may log, several times
MAX_ERROR = 400  # characters of what a function raised or returned


NamedReward = tuple[str, float, Per | None]
"""A function by its name, its weight, and what it is called per; None is as it asks for itself."""


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
    extra: dict[str, Any] = field(default_factory=dict)
    """What functions have logged of this completion."""


@dataclass(frozen=True)
class Imported:
    """A process has imported the functions, or says why it cannot."""

    problem: str | None
    per: tuple[Per, ...] = ()
    """What the functions are called per."""


@dataclass(frozen=True)
class RewardDone:
    results: list[RewardResult]
    """Of a call, as far as its functions go."""
    seconds: float
    metrics: dict[str, MeanOf] = field(default_factory=dict)
    """What functions have logged in it."""


class RewardProcess:
    """A child that runs rewards, and the calls that it has been sent and not replied to."""

    def __init__(self, functions: list[NamedReward], mailbox: Mailbox, log: Path | None):
        self.functions = functions
        self.mailbox = mailbox
        self.log = log
        self.deaths = 0
        """In a row, without a result in between."""
        self._start()

    def _start(self) -> None:
        self.jobs: deque[RewardCall] = deque()
        self.since = 0.0
        """When the first of `jobs` was begun (`time.monotonic`)."""
        self.ready = False
        self.child = Child("paceline.tasks.reward_worker", self.mailbox, self.log, guarded=True, limit=MAX_REPLY)
        self.child.send(self.functions)

    def restart(self) -> None:
        self.child.close()
        self._start()

    def can_take(self, call: RewardCall) -> bool:
        """Whether it can be sent another call ahead; what has arrived is only sent to one that has no such call."""
        if call.per == "arrived" and any(job.per == "arrived" for job in self.jobs):
            return False
        sent = sum(job.chars for job in self.jobs)
        return not self.jobs or (len(self.jobs) < MAX_JOBS and sent + call.chars <= MAX_JOB_CHARS)

    def send(self, call: RewardCall) -> None:
        """Raises what pickle raises if the sample's columns cannot be sent."""
        if not self.jobs:
            self.since = time.monotonic()
        self.child.send(call)
        self.jobs.append(call)


def try_rewards(rewards: list[Reward], call: RewardCall) -> RewardDone:
    """Call the reward functions with the call's `per`; whatever a user's function does wrong becomes part of the
    result, of one completion if it is one's value, else of all in the call."""
    started = time.perf_counter()
    log = RewardLog()
    results = [RewardResult(answer.request_id) for answer in call.answers]
    for reward in rewards:
        if reward.per != call.per:
            continue
        try:
            values = compute_rewards(reward, call.answers, log)
        except (Exception, SystemExit) as err:  # noqa: BLE001 (the user's code: it is reported in the result)
            first = _failed(call.answers[0].request_id, reward.name, err)
            others = [replace(first, request_id=answer.request_id, trace="") for answer in call.answers[1:]]
            return RewardDone([first, *others], time.perf_counter() - started)
        for i, value in enumerate(values):
            if isinstance(value, BadReward):
                results[i] = _failed(results[i].request_id, reward.name, value)
            elif value is not None and results[i].error is None:
                results[i].values[reward.name] = value
    for i, result in enumerate(results):
        result.extra = {column: values[i] for column, values in log.extras.items()}
    return RewardDone(results, time.perf_counter() - started, log.metrics)


def _failed(request_id: int, name: str, err: BaseException) -> RewardResult:
    message = shorten(_text_of(err), MAX_ERROR)
    if isinstance(err, BadReward):
        return RewardResult(request_id, error=f"the reward {name} {message}", kind=f"{name} {message[:40]}")
    where = where_raised(err.__traceback__)
    at = f" (at {where})" if where else ""
    error = f"the reward {name} raised {type(err).__name__}: {message}{at}"
    trace = "".join(traceback.format_exception(err))[-MAX_TRACE:]
    return RewardResult(request_id, error=error, kind=f"{name} {type(err).__name__} {where}", trace=trace)


def _text_of(err: BaseException) -> str:
    try:
        return str(err)
    except Exception as second:  # noqa: BLE001 (a user's exception may fail to say what it is)
        return f"(its text cannot be shown: {type(second).__name__})"
