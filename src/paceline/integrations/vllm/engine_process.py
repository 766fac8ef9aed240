"""The process of a vLLM engine, as the process of the learner sees it: started, listened to, given up when it is silent
for too long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import UserError
from paceline.integrations.vllm.rollout_messages import EngineFailed, EngineStarted, StartEngine
from paceline.process.child import Child, Ended, Mailbox, Said

PROGRAM = "paceline.integrations.vllm.rollout_program"
LISTEN_S = 0.1
T = TypeVar("T")


class EngineLost(Exception):
    """The process has ended, or does not answer; the text says why."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds."""

    start: float
    answer: float


class EngineProcess:
    def __init__(
        self,
        start: StartEngine,
        environment: Mapping[str, str],
        log: Path | None,
        deadlines: Deadlines,
        python: str,
        still_alive: Callable[[], None],
    ):
        """Starts it, and waits until it has loaded the model. What goes wrong there is an error of the user's: it would
        come again."""
        self._log = log
        self._deadlines = deadlines
        self._still_alive = still_alive
        self._mailbox = Mailbox()
        self._kept: deque[Any] = deque()  # messages that came while another one was waited for
        self._child = Child(PROGRAM, self._mailbox, log, environment, guarded=True, executable=python)
        self._heard = time.monotonic()
        self._child.send(start)
        try:
            self.facts = self._wait(EngineStarted, deadlines.start)
        except EngineLost as err:
            self.close()
            raise UserError(f"the vLLM engine could not be started: {err}") from err

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, message: object) -> None:
        self._child.send(message)

    def ask(self, message: object, answer: type[T]) -> T:
        """Send it, and wait for the answer."""
        self._child.send(message)
        return self._wait(answer, self._deadlines.answer)

    def _wait(self, kind: type[T], seconds: float) -> T:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for message in self._listen(LISTEN_S):
                if isinstance(message, kind):
                    return message
                self._kept.append(message)
            self._still_alive()
        raise EngineLost(f"it did not answer within {seconds:.0f} s{self._where}")

    def take(self, seconds: float, expected: bool) -> list[Any]:
        """What it has said, waiting for so long if it has said nothing; `expected` is whether it has work, and so
        should say something sooner or later."""
        messages = [*self._kept, *self._listen(0.0 if self._kept else seconds)]
        self._kept.clear()
        silent = time.monotonic() - self._heard
        if expected and silent > self._deadlines.answer:
            raise EngineLost(f"it said nothing for {silent:.0f} s (cluster.timeout_s)")
        return messages

    def working(self) -> None:
        """It has work from now on."""
        self._heard = time.monotonic()

    def _listen(self, seconds: float) -> list[Any]:
        out = []
        for news in self._mailbox.take(seconds):
            self._heard = time.monotonic()
            if isinstance(news, Ended):
                raise EngineLost(self._why(news))
            assert isinstance(news, Said)
            if isinstance(news.message, EngineFailed):
                raise EngineLost(f"{news.message.sentence}{self._where}")
            out.append(news.message)
        return out

    def _why(self, news: Ended) -> str:
        code = self._child.how_it_ended()
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"its process {news.reason} ({how}){self._where}"

    @property
    def _where(self) -> str:
        return f"; see {self._log}" if self._log else ""

    def close(self) -> None:
        self._child.close()
