"""Training in a process of its own, as the engine's process sees it. It ends with that process, is given up when it is
silent for too long, and its end is a sentence: the engine goes on with the drafter that it has."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paceline.draft.eagle.files import WEIGHTS
from paceline.errors import RunError, UserError
from paceline.integrations.vllm.messages import (
    GOES_ON,
    Activity,
    Answers,
    Beat,
    Following,
    GaveUp,
    NewVersion,
    NowDoing,
    Offered,
    PolicyAt,
    Trouble,
    When,
)
from paceline.integrations.vllm.training import ANSWERS
from paceline.process.child import Child, Ended, Mailbox, Said

if TYPE_CHECKING:
    from paceline.integrations.vllm.plan import FollowPlan

PROGRAM = "paceline.integrations.vllm.side_car_program"
START_DEADLINE_S = 1800.0
"""Seconds for loading the policy."""
TAKE_S = 0.2


class SideCarTraining:
    def __init__(
        self, plan: FollowPlan, when: When, report: Callable[[str], None], deadline_s: float, log: Path | None
    ):
        self._report = report
        self._deadline_s = deadline_s
        self._log = log
        self._folder = plan.folder
        self._mailbox = Mailbox()
        self._new: NewVersion | None = None
        self._answer: NewVersion | Trouble | None = None  # to an offer
        self._following = False
        self._activity: Activity = "idle"  # of the engine
        self.ended: str | None = None
        """Why there is no training any more."""
        environment = {"OMP_NUM_THREADS": str(plan.threads)} if plan.threads else {}
        self.child: Child | None = Child(PROGRAM, self._mailbox, log, environment)
        self._heard = time.monotonic()
        self._send((plan, when))

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child else None

    def answers(self, of: ANSWERS) -> None:
        self._send(Answers(of))

    def activity(self, now: Activity) -> None:
        self._activity = now
        self._send(NowDoing(now))

    def policy_updated(self, weights: Mapping[str, Tensor] | Path) -> None:
        if isinstance(weights, Path):
            self._send(PolicyAt(str(weights), temporary=False))
            return
        folder = Path(tempfile.mkdtemp(prefix=".policy-", dir=self._folder))
        try:
            save_file({name: t.detach().cpu().contiguous() for name, t in weights.items()}, folder / WEIGHTS)
        except (OSError, SafetensorError) as err:
            shutil.rmtree(folder, ignore_errors=True)
            raise RunError(f"the policy's new weights could not be written to {folder}: {err}") from err
        self._send(PolicyAt(str(folder), temporary=True))

    def offer(self, folder: Path) -> None:
        self._answer = None
        self._send(Offered(str(folder.resolve())))
        end = time.monotonic() + self._deadline_s
        while self._answer is None and self.child is not None and time.monotonic() < end:
            self._take(TAKE_S)
        if isinstance(self._answer, Trouble):
            raise UserError(self._answer.sentence)
        if self._answer is None:
            raise UserError(f"the drafter at {folder} was not examined: {self.ended or 'the side-car did not answer'}")

    def train(self, seconds: float) -> None:
        """It trains by itself: give it the time."""
        self._send(NowDoing("idle"))
        end = time.monotonic() + seconds
        while self.child is not None and (left := end - time.monotonic()) > 0:
            self._take(min(TAKE_S, left))
        self._send(NowDoing(self._activity))

    def poll(self) -> NewVersion | None:
        self._take(0.0)
        new = self._new
        self._new = None
        return new

    def close(self) -> None:
        if self.child is not None:
            self.child.close()
            self.child = None

    def wait_until_following(self) -> None:
        """Until the policy is loaded, or training has ended."""
        while self.child is not None and not self._following:
            self._take(TAKE_S)

    def _send(self, message: object) -> None:
        if self.child is not None:
            self.child.send(message)

    def _take(self, seconds: float) -> None:
        if self.child is None:
            return
        for news in self._mailbox.take(seconds):
            self._heard = time.monotonic()
            if isinstance(news, Said):
                self._hear(news.message)
            elif isinstance(news, Ended):
                self._end(self._why(news))
        silent = time.monotonic() - self._heard
        deadline = self._deadline_s if self._following else max(self._deadline_s, START_DEADLINE_S)
        if self.child is not None and silent > deadline:
            self._end(f"it was silent for {silent:.0f} s")

    def _hear(self, message: Any) -> None:
        match message:
            case Beat():
                pass
            case NewVersion():
                self._new = message
                self._answer = message if message.of_offer else self._answer
            case Following(memory=memory):
                self._following = True
                self._report(memory)
            case Trouble(sentence=sentence, of_offer=of_offer):
                if of_offer:
                    self._answer = message
                else:
                    self._report(f"{sentence}; {GOES_ON}")
            case GaveUp(sentence=sentence):
                self._end(sentence)

    def _why(self, news: Ended) -> str:
        code = self.child.how_it_ended() if self.child else None
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        log = f", see {self._log}" if self._log else ""
        return f"its process {news.reason} ({how}{log})"

    def _end(self, why: str) -> None:
        if self.child is None:
            return
        self.close()
        self.ended = f"the drafter's training has ended: {why}"
        self._report(f"{self.ended}; {GOES_ON}")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()


def side_car_threads() -> int:
    """Cores for the side-car on a CPU: half of them, the engine has the others."""
    return max(1, (os.cpu_count() or 2) // 2)
