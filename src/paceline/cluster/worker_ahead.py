"""A worker's part in writing ahead: with nothing to decode, it begins the next step's requests with the present policy.

What it writes is a hint: it is lost with the worker, interrupted within a round by anything else, and verified by the
policy of the next step. Nothing depends on how far it came.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.rollout.stats import EngineStats

if TYPE_CHECKING:
    from paceline.core import Request
    from paceline.rollout.engine import RolloutEngine
    from paceline.rollout.stats import RoundRecord

Tokens = array  # of "i": a fourth of what a list takes on its way to the driver


class WorkerAhead:
    def __init__(self) -> None:
        self.written: dict[int, Tokens[int]] = {}
        """By request: what it has written in this rollout, or was given to go on with."""
        self._complete: set[int] = set()
        self._engine: RolloutEngine | None = None
        self._stats = EngineStats()
        self._on_round: Callable[[RoundRecord], None] | None = None

    @property
    def active(self) -> bool:
        return self._engine is not None

    def begin(self, engine: RolloutEngine, requests: Sequence[Request], written: Mapping[int, Tokens[int]]) -> None:
        """Write these with an engine that has no requests, going on where they were left. What it counts meanwhile is
        no part of the rollout."""
        self._engine = engine
        self._stats = engine.recorder.stats
        self._on_round = engine.record
        engine.recorder.stats = EngineStats()
        engine.record = None
        self.written = {**written, **self.written}
        engine.submit([r for r in requests if r.id not in self._complete], self.written)

    def step(self) -> bool:
        """One round -> whether there is more to write."""
        assert self._engine is not None
        for completion in self._engine.step():
            self.written[completion.request.id] = array("i", completion.tokens)
            self._complete.add(completion.request.id)
        return bool(self._engine.runnable)  # a turn that has ended is not answered before its step

    def stop(self) -> None:
        """The engine is needed, or the rollout is over: keep what there is."""
        engine = self._engine
        if engine is None:
            return
        scheduler = engine.scheduler
        for seq in (*scheduler.running, *scheduler.waiting, *scheduler.suspended.values()):
            if seq.generated:
                self.written[seq.request.id] = array("i", seq.tokens[len(seq.request.prompt) :])
        engine.clear()
        engine.recorder.stats = self._stats
        engine.record = self._on_round
        self._engine = None

    def forget(self) -> None:
        """Another rollout begins."""
        self.stop()
        self.written = {}
        self._complete.clear()
