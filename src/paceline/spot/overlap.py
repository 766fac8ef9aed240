"""Training the drafter on a GPU that decodes: in the tail of a rollout few requests run, and most of the card is idle.

A step is computed on a stream that yields to decoding, and polled between two rounds, which costs the host almost
nothing: a thread lays out the sequences of the next step, and the gradients are one graph replay.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from paceline.spot.samples import FeatureSample, lay_out
from paceline.spot.trainer import SpotTrainer, TrainingStats

if TYPE_CHECKING:
    from paceline.draft.eagle.loss import PackedSequences

LAY_OUT_S = 300.0  # seconds: what takes longer than that to lay out a step of some thousand tokens has died
TAIL_DIVISOR = 4  # the tail begins when at most one in so many of the requests that ran at once are unfinished


class OverlappedTraining:
    def __init__(self, trainer: SpotTrainer):
        self.trainer = trainer
        device = trainer.drafter.fc.device
        # Graphs of the engine are captured on a stream of higher priority.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "lay-out")
        self._packs: Iterator[list[FeatureSample]] | None = None
        self._next: Future[PackedSequences] | None = None
        self._since: float | None = None  # when the step that is being computed was begun
        self._due = False
        self._peak = 0  # most requests that were unfinished at once in this rollout
        self.stats = TrainingStats()
        """What was trained since `start`."""

    def start(self, due: bool = True) -> None:
        """A rollout begins, and training is due in its tail, or not."""
        self.stats = TrainingStats()
        self._packs = None
        self._due = due
        self._peak = 0

    def after_round(self, left: int, waiting: int) -> None:
        """`left` requests are unfinished, `waiting` of them not begun: train if this is the tail."""
        self._peak = max(self._peak, left)
        if self._due and not waiting and 0 < left * TAIL_DIVISOR <= self._peak:
            self.poll()

    def poll(self) -> None:
        """Between two rounds: end the step that is done, and begin the next one if it is laid out."""
        if self._since is not None:
            if not self.trainer.computed:
                return
            self._end()
        if self._packs is None:
            self._packs = self.trainer.packs()
            self._lay_out_next()
        if self._next is not None and self._next.done():
            sequences = self._next.result()
            with self._overlap():
                self.trainer.begin(sequences)
            self._since = time.perf_counter()
            self._lay_out_next()  # only now: a graph may have been captured

    def stop(self) -> TrainingStats:
        """The last answer is in: wait for the step that is being computed, and begin no other."""
        if self._since is not None:
            self._end()
        if self._next is not None:
            self._next.result(LAY_OUT_S)
        self._next = self._packs = None
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self.stats

    def _lay_out_next(self) -> None:
        assert self._packs is not None
        pack = next(self._packs, None)  # None if there is nothing to learn from
        pin = self._stream is not None
        self._next = self._thread.submit(lay_out, pack, pin) if pack else None

    def _end(self) -> None:
        assert self._since is not None
        with self._overlap():
            step = self.trainer.end()
        step.seconds = time.perf_counter() - self._since
        self.stats += step
        self._since = None

    def _overlap(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        if self._since is None and not self.stats.steps:
            self._stream.wait_stream(torch.cuda.current_stream())  # the policy's last update
        return torch.cuda.stream(self._stream)
