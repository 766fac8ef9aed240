"""Training in the engine's own process: between its calls, or in a thread that takes a share of the time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import Sentence
from paceline.integrations.vllm.features import read_update
from paceline.integrations.vllm.messages import GOES_ON, Activity, NewVersion, When
from paceline.integrations.vllm.training import ANSWERS, TrainingLoop

if TYPE_CHECKING:
    from paceline.integrations.vllm.plan import FollowPlan

PAUSE_S = 0.05  # while there is nothing to do
STOP_S = 60.0  # in which a thread ends its step


class LocalTraining:
    """The thread, if there is one, takes `share` of the time while the engine is busy, and all of it otherwise."""

    def __init__(self, plan: FollowPlan, when: When, report: Callable[[str], None], share: float | None = None):
        self.loop = TrainingLoop(plan.make(), when)
        self._report = report
        self._share = share
        self._new: NewVersion | None = None
        self._finished: deque[tuple[list[int], list[int]]] = deque()
        self._lock = threading.Lock()  # of everything that trains
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        report(plan.describe_memory())
        if share is not None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="paceline-drafter")
            self._thread.start()

    def answers(self, of: ANSWERS) -> None:
        self._finished.extend(of)  # taken up by the next turn: the engine's step does not wait for the one that runs

    def activity(self, now: Activity) -> None:
        self.loop.activity = now

    def policy_updated(self, weights: Mapping[str, Tensor] | Path) -> None:
        tensors = read_update(weights) if isinstance(weights, Path) else weights
        with self._lock, self._told():
            self._take_up()
            self._keep(self.loop.online.policy_updated(tensors))

    def offer(self, folder: Path) -> None:
        with self._lock:
            self._take_up()
            self._keep(self.loop.online.offer(folder))

    def train(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._closing.is_set() and self._turn():
            continue
        with self._lock, self._told():
            self._keep(self.loop.online.publish())

    def poll(self) -> NewVersion | None:
        new = self._new
        self._new = None
        return new

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _turn(self) -> bool:
        # vLLM computes under inference_mode, in which nothing can be trained.
        with self._lock, torch.inference_mode(False), self._told():
            self._take_up()
            worked, new = self.loop.turn()
            self._keep(new)
            return worked
        return False

    def _take_up(self) -> None:
        while self._finished:
            self.loop.online.finished(*self._finished.popleft())

    def _keep(self, new: NewVersion | None) -> None:
        self._new = new or self._new

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong here must not stop generation. Without memory there is no sense in another step."""
        try:
            yield
        except Sentence as err:
            self._report(f"{err}; {GOES_ON}")
        except torch.OutOfMemoryError as err:
            self._closing.set()
            self._report(f"the drafter's training has ended, out of memory ({err}); {GOES_ON}")

    def _run(self) -> None:
        """The thread's."""
        share = self._share or 0.0
        while not self._closing.is_set():
            started = time.monotonic()
            worked = (share > 0 or self.loop.may_train) and self._turn()
            took = time.monotonic() - started
            rest = took * (1 - share) / share if share and not self.loop.may_train else 0.0
            self._closing.wait(max(rest, 0.0 if worked else PAUSE_S))
