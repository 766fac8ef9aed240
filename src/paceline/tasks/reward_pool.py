"""Rewards overlap with decoding: completions are rewarded in other processes as soon as they are finished, or as soon
as all of their group are (see `reward_call`).

A process can be killed, which is the only way to stop a function that hangs, and it shares no lock with the engine. It
imports the tasks and the user's function and nothing else, so it starts in a moment.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.core import Sample
from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.process.child import Said
from paceline.process.pool import POLL, ChildPool, signal_name
from paceline.tasks.environments.protocol import Messages
from paceline.tasks.reward_call import FinishedAnswer, Per, RewardCall
from paceline.tasks.reward_errors import RewardErrors
from paceline.tasks.reward_process import Imported, RewardDone, RewardProcess, RewardResult, try_rewards
from paceline.tasks.reward_queue import RewardQueue
from paceline.tasks.rewards import Reward, load_reward

MAX_DEATHS = 3  # of a process in a row without a result in between, before the run stops


class RewardPool(ChildPool[RewardProcess]):
    """Submit completions, collect results. `functions` are (name, weight) pairs as in the settings, or rewards that are
    Python objects; those run in this process, because no other could import them. `per` says of some of the names what
    they are called per; the others ask for it themselves."""

    imported_message = Imported

    def __init__(
        self,
        functions: Sequence[tuple[str, float]] | Sequence[Reward],
        workers: int = 1,
        timeout_s: float = 30.0,
        log: Path | None = None,
        start_timeout_s: float = 120.0,
        per: Mapping[str, Per] | None = None,
    ):
        super().__init__(log)
        objects = [f for f in functions if isinstance(f, Reward)]
        named = [(*f, (per or {}).get(f[0])) for f in functions if not isinstance(f, Reward)]
        self.functions = [(r.name, r.weight) for r in objects] + [(name, weight) for name, weight, _ in named]
        workers = 0 if objects else workers
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.seconds = 0.0
        """Time that the functions took, whoever waited for it."""
        self.errors = RewardErrors(log)
        self._queue = RewardQueue()
        self._killed: set[tuple[Per, int]] = set()  # calls on which a process was killed once
        self._inline = [*objects, *(load_reward(*f) for f in named)] if workers == 0 else []
        if self._inline:
            self._queue.know(tuple(dict.fromkeys(reward.per for reward in self._inline)))
        self._processes = [RewardProcess(named, self._mailbox, log) for _ in range(workers)]

    def ready(self) -> None:
        """Wait until the functions are imported; say so if one cannot be."""
        self._wait_until_ready()

    @property
    def open(self) -> int:
        """Completions submitted whose result has not been collected."""
        return self._queue.open

    def submit(
        self,
        request_id: int,
        sample: Sample,
        text: str,
        tokens: list[int],
        group: int | None = None,
        size: int = 1,
        messages: Messages | None = None,
    ) -> None:
        """`group` is a number for the completions of a prompt, of which `size` are going to be submitted; without it
        the completion is alone. Of a conversation `text` is the last turn, and `messages` are all of it."""
        answer = FinishedAnswer(request_id, sample, text, tokens, messages)
        self._queue.add(answer, -1 - request_id if group is None else group, 1 if group is None else size)
        self._feed()

    def collect(self, block: bool = False) -> list[RewardResult]:
        """Results that are in; with `block`, wait a moment for one."""
        if self._processes:
            self._poll(POLL if block and not self._queue.results else 0.0)
        elif call := self._queue.arrived():
            self._queue.took(call)
            self._call_here(call)
        results = self._queue.results
        self._queue.results = []
        for result in results:  # in the order of the functions, whichever was called first
            result.values = {name: result.values[name] for name, _ in self.functions if name in result.values}
        return results

    def logged(self) -> dict[str, float]:
        """Means of what functions have logged by `log_metric` since the last time."""
        logged = self._queue.metrics
        self._queue.metrics = {}
        return {name: one.mean for name, one in logged.items()}

    def _imported(self, message: Imported) -> None:
        self._queue.know(message.per)

    def _replied(self, process: RewardProcess, message: Said) -> None:
        done: RewardDone = message.message
        process.jobs.popleft()
        process.since = message.at
        process.deaths = 0
        self.seconds += done.seconds
        self._queue.done(done)

    def _check_time(self, process: RewardProcess) -> None:
        now = time.monotonic()
        if not process.ready and now - process.child.started > self.start_timeout_s:
            raise UserError(
                f"importing the reward {self._names} took longer than {self.start_timeout_s:g} s "
                f"(reward.start_timeout_s){self._see_log}"
            )
        if process.jobs and now - process.since > self.timeout_s * len(process.jobs[0].answers):
            job = process.jobs.popleft()
            self._blame(job, f"took longer than {self.timeout_s * len(job.answers):g} s{_for_several(job)}")
            self._requeue(process)

    def _ended(self, process: RewardProcess, reason: str) -> None:
        code = process.child.how_it_ended()
        how = "was ended" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal_name(-code)})"
        process.deaths += 1
        if not process.ready and (code is None or code >= 0):
            raise UserError(f"the reward process {how} while it was importing the functions{self._see_log}")
        if process.deaths > MAX_DEATHS:
            times = f"{MAX_DEATHS} times in a row"
            raise UserError(f"the process of the reward {self._names} {how}, {times}{self._see_log}")
        if process.jobs:
            # A function that exits does so by itself; one that is killed may be the victim of something else.
            job = process.jobs.popleft()
            if code is not None and code < 0 and job.key not in self._killed:
                self._killed.add(job.key)
                process.jobs.appendleft(job)
            else:
                again = " twice on the same answer" if job.key in self._killed else ""
                self._blame(job, f"ended its process{again}: it {how}" if code is not None else f"{reason}")
        self._requeue(process)

    def _blame(self, call: RewardCall, what: str) -> None:
        error = f"the reward {self._names} {what}"
        self._queue.done(RewardDone([RewardResult(answer.request_id, error=error) for answer in call.answers], 0.0))

    def _requeue(self, process: RewardProcess) -> None:
        """A new process takes over; calls that the last one had not made go back to the head of the queue."""
        self._queue.waiting.extendleft(reversed(process.jobs))
        process.restart()

    def _feed(self) -> None:
        """Calls that can be made are made here, or each goes to the process with the fewest, if one can take it."""
        waiting = self._queue.waiting
        if self._inline:
            while waiting:
                self._call_here(waiting.popleft())
            return
        while waiting and self._send(waiting[0]):
            waiting.popleft()
        while (call := self._queue.arrived()) and self._send(call):
            self._queue.took(call)

    def _call_here(self, call: RewardCall) -> None:
        done = try_rewards(self._inline, call)
        self.seconds += done.seconds
        self._queue.done(done)

    def _send(self, call: RewardCall) -> bool:
        able = [process for process in self._processes if process.ready and process.can_take(call)]
        if not able:
            return False
        try:
            min(able, key=lambda process: len(process.jobs)).send(call)
        except (pickle.PicklingError, TypeError, AttributeError) as err:
            self._blame(call, f"cannot be given the sample's columns: {shorten(str(err))}")
        return True

    @property
    def _names(self) -> str:
        return " or ".join(name for name, _ in self.functions)


def _for_several(call: RewardCall) -> str:
    return f" for {len(call.answers)} completions" if len(call.answers) > 1 else ""
