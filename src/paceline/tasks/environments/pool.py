"""The processes in which environments and tools run beside decoding, as rewards do (`tasks/reward_pool.py`).

A call that takes too long is answered by an error, and its process gets no other; one that ends its process is found by
running those that were in it alone, one after the other. Episodes that were in a process that has ended are caught up
in another one, by doing again what they have done.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from paceline.core import Prompt, Sample
from paceline.errors import RunError, UserError
from paceline.files.reading import shorten
from paceline.process.child import Said
from paceline.process.pool import POLL, ChildPool, signal_name
from paceline.tasks.environments.messages import Action, EnvironmentJob, JobDone, ToolboxReady, ToolboxSpec
from paceline.tasks.environments.process import EnvironmentProcess

MAX_STARTS = 3  # that end in a row while everything is imported, before the run stops


class EnvironmentPool(ChildPool[EnvironmentProcess]):
    imported_message = ToolboxReady

    def __init__(self, spec: ToolboxSpec, workers: int = 2, timeout_s: float = 30.0, log: Path | None = None):
        super().__init__(log)
        self.spec = spec
        self.timeout_s = timeout_s
        self.imported: ToolboxReady | None = None
        """What the first process has told."""
        self._waiting: deque[EnvironmentJob] = deque()
        self._homes: dict[int, EnvironmentProcess] = {}  # by episode: which process knows it
        self._done: list[JobDone] = []
        self._numbers: Iterator[int] = iter(range(2**62))
        self._processes = [EnvironmentProcess(spec, self._mailbox, log) for _ in range(max(1, workers))]

    def ready(self) -> ToolboxReady:
        """Wait until all is imported; say so if something cannot be."""
        self._wait_until_ready()
        assert self.imported is not None
        return self.imported

    @property
    def keeps_state(self) -> bool:
        """Whether there are environments, and not only tools."""
        return self.imported is not None and self.imported.keeps_state

    def submit(self, episode: int, sample: Sample, actions: tuple[Action, ...], last: bool) -> int:
        """The latest of an episode's actions -> the number of its result."""
        job = EnvironmentJob(next(self._numbers), episode, sample, actions, last)
        self._waiting.append(job)
        self._feed()
        return job.number

    def prompt(self, sample: Sample) -> Prompt:
        """What an environment makes of a sample's prompt. Waits for it."""
        number = self.submit(-1, sample, (), False)
        while True:
            for done in self._done:
                if done.number == number:
                    self._done.remove(done)
                    if done.error:
                        raise UserError(
                            f"the environment's reset of {sample.where} failed: {done.error}{self._see_log}"
                        )
                    assert done.prompt is not None
                    return done.prompt
            self._poll(POLL)

    def collect(self) -> list[JobDone]:
        """Results that are in; never waits."""
        self._poll(0.0)
        done = self._done
        self._done = []
        return done

    def forget(self) -> None:
        """Nobody asks for what is being done any more."""
        for process in self._processes if self.imported else ():
            process.child.send(None)
        self._waiting.clear()
        self._homes.clear()
        self._done.clear()

    def _imported(self, message: ToolboxReady) -> None:
        self.imported = self.imported or message

    def _replied(self, process: EnvironmentProcess, message: Said) -> None:
        done: JobDone = message.message
        process.deaths = 0
        if process.jobs.pop(done.number, None):  # otherwise it took too long, and was answered
            self._done.append(done)
        self._end_retired(process)

    def _check_time(self, process: EnvironmentProcess) -> None:
        if not process.ready and time.monotonic() - process.child.started > self.spec.start_timeout_s:
            raise UserError(
                f"importing the environment and the tools took longer than {self.spec.start_timeout_s:g} s "
                f"(environment.start_timeout_s){self._see_log}"
            )
        for job in process.overdue(self.timeout_s):
            del process.jobs[job.number]
            process.retired = True
            self._fail(job, f"took longer than {self.timeout_s:g} s")
        self._end_retired(process)

    def _end_retired(self, process: EnvironmentProcess) -> None:
        if process.retired and not process.jobs:
            self._leave(process)
            process.restart()

    def _ended(self, process: EnvironmentProcess, reason: str) -> None:
        code = process.child.how_it_ended()
        jobs = list(process.jobs.values())
        process.jobs = {}
        if not process.ready or not jobs:
            process.deaths += 1
            if process.deaths > MAX_STARTS:
                raise RunError(
                    f"the process of the environment ended {MAX_STARTS} times in a row ({reason}){self._see_log}"
                )
        by_signal = code is not None and code < 0
        for job in reversed(jobs):
            if (len(jobs) == 1 or job.alone) and (job.killed or not by_signal):
                self._fail(job, f"ended its process ({_how(code, reason)})")
                continue
            job.killed = job.killed or (by_signal and len(jobs) == 1)
            job.alone = True
            self._waiting.appendleft(job)
        self._leave(process)
        process.restart()

    def _fail(self, job: EnvironmentJob, what: str) -> None:
        self._homes.pop(job.episode, None)
        self._done.append(JobDone(job.number, error=what))

    def _leave(self, process: EnvironmentProcess) -> None:
        """What it knew of episodes is gone."""
        self._homes = {episode: home for episode, home in self._homes.items() if home is not process}

    def _feed(self) -> None:
        """Each job goes to the process that knows its episode, or else to the one with the fewest."""
        kept: deque[EnvironmentJob] = deque()
        while self._waiting:
            job = self._waiting.popleft()
            if not self._send(job):
                kept.append(job)
        self._waiting = kept

    def _send(self, job: EnvironmentJob) -> bool:
        able = [process for process in self._processes if process.can_take(job)]
        if not able:
            return False
        home = self._homes.get(job.episode)
        process = home if home in able and home is not None else min(able, key=lambda one: len(one.jobs))
        try:
            process.send(job)
        except (pickle.PicklingError, TypeError, AttributeError) as err:
            self._fail(job, f"cannot be given the sample's columns: {shorten(str(err))}")
            return True
        if job.actions and not job.last:
            self._homes[job.episode] = process
        else:
            self._homes.pop(job.episode, None)
        return True


def _how(code: int | None, reason: str) -> str:
    if code is None:
        return reason
    return f"exit code {code}" if code >= 0 else f"signal {signal_name(-code)}"
