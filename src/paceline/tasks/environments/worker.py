"""The program of an environment process: import everything, then step episodes until the driver is gone, each call in a
thread of its own, so that one that waits for something blocks no other."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from dataclasses import replace

from paceline.core import Sample
from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.process.program import Parent, join_parent
from paceline.tasks.environments.load import load_toolbox
from paceline.tasks.environments.messages import EnvironmentJob, JobDone, ToolboxReady
from paceline.tasks.environments.protocol import BadStep
from paceline.tasks.environments.toolbox import Episode, Toolbox
from paceline.tasks.reward_errors import MAX_TRACE, where_raised

MAX_ERROR = 400  # characters of what an environment raised


class Episodes:
    def __init__(self, box: Toolbox, parent: Parent):
        self.box = box
        self.parent = parent
        self._known: dict[int, Episode] = {}

    def forget(self) -> None:
        self._known = {}

    def run(self, job: EnvironmentJob) -> None:
        """In a thread of its own."""
        started = time.perf_counter()
        try:
            done = self._do(job)
        except (Exception, SystemExit) as err:  # noqa: BLE001 (the user's code: it is reported in the result)
            done = JobDone(job.number, error=_told(err), trace="".join(traceback.format_exception(err))[-MAX_TRACE:])
        if done.result is not None:
            done = replace(done, result=replace(done.result, seconds=time.perf_counter() - started))
        self.parent.send(done)

    def _do(self, job: EnvironmentJob) -> JobDone:
        if not job.actions:
            return JobDone(job.number, prompt=self.box.prompt(job.sample))
        episode = self._known.pop(job.episode, None)
        if episode is None or (self.box.keeps_state and episode.steps != len(job.actions) - 1):
            episode = self._caught_up(job.sample, job)
        action = job.actions[-1]
        result = episode.step(action.text, action.raw, job.last)
        if not (result.done or job.last):
            self._known[job.episode] = episode
        return JobDone(job.number, result)

    def _caught_up(self, sample: Sample, job: EnvironmentJob) -> Episode:
        """One in which all but the last action have been done."""
        episode = Episode(self.box, sample)
        for action in job.actions[:-1] if self.box.keeps_state else ():
            if not action.failed:
                episode.step(action.text, action.raw, False)
        episode.steps = len(job.actions) - 1
        return episode


def _told(err: BaseException) -> str:
    message = shorten(str(err), MAX_ERROR)
    if isinstance(err, BadStep):
        return message
    where = where_raised(err.__traceback__)
    return f"{type(err).__name__}: {message}" + (f" ({where})" if where else "")


def main() -> None:
    parent = join_parent()
    me = os.getpid()
    sys.path.insert(0, os.getcwd())
    try:
        box = load_toolbox(parent.receive())
        parent.send(ToolboxReady(None, tuple(box.schemas()), box.keeps_state))
    except UserError as err:
        parent.send(ToolboxReady(str(err)))
        return
    except (Exception, SystemExit) as err:  # noqa: BLE001 (making an environment runs the user's code)
        parent.send(ToolboxReady(f"the environment cannot be made: {_told(err)}"))
        return
    episodes = Episodes(box, parent)
    while True:
        job = parent.receive()
        if os.getpid() != me:
            os._exit(0)
        if job is None:
            episodes.forget()
            continue
        threading.Thread(target=episodes.run, args=(job,), daemon=True).start()


if __name__ == "__main__":
    main()
