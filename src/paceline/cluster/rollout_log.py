"""What a worker does in one rollout, as plain records. Whoever draws timelines makes spans of them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.cluster.messages import Activity, ActivityKind, RolloutOutcome

if TYPE_CHECKING:
    from paceline.rollout.stats import RoundRecord
    from paceline.rollout.worker_engine import WorkerEngine
    from paceline.spot.trainer import TrainingStats

SHORT_S = 1e-3  # seconds: an activity that took less is not recorded


class RolloutLog:
    def __init__(self, worker: int, step: int, engine: WorkerEngine, alone: bool):
        """Begins idle. A worker that is `alone` waits for nobody: when it has nothing left to decode, rewards are being
        computed, so that it is idle is not recorded."""
        self.worker = worker
        self.step = step
        self.engine = engine
        self.alone = alone
        self.rounds: list[RoundRecord] = []
        self._activities: list[Activity] = []
        self._kind: ActivityKind | None = "idle"
        self._since = time.time()
        self._clock_offset: float | None = None
        self._stats = engine.stats.snapshot()
        self._explored_s = engine.tuner.explored_s
        self._tuned_s = engine.tuner.total_s
        engine.record = self._record

    def _record(self, round: RoundRecord) -> None:
        # Between the end of a round and now other things may have happened: the smallest difference is the best.
        offset = time.time() - (round.at + round.seconds)
        self._clock_offset = offset if self._clock_offset is None else min(offset, self._clock_offset)
        self.rounds.append(round)

    def begin(self, kind: ActivityKind | None) -> None:
        """From now on the worker is idle, trains or writes ahead; None while it decodes, which the rounds tell."""
        now = time.time()
        waits = self._kind == "idle" and self.alone
        if self._kind and now - self._since > SHORT_S and not waits:
            self._activities.append(Activity(self._kind, self._since, now))
        self._kind = kind
        self._since = now

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return self.engine.stats.decoded_tokens - self._stats.decoded_tokens

    def end(self, training: TrainingStats, ahead: Mapping[int, array[int]]) -> RolloutOutcome:
        self.begin(None)
        tuner = self.engine.tuner
        return RolloutOutcome(
            self.worker,
            self.step,
            self._activities,
            self.rounds,
            self._clock_offset or 0.0,
            self.engine.stats.since(self._stats),
            training,
            tuner.explored_s - self._explored_s,
            tuner.total_s - self._tuned_s,
            dict(ahead),
        )
