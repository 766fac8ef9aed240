"""Takes note of what the engine does: counts, and every round for those who look closer."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.rollout.graphs import GraphPool
from paceline.rollout.in_flight import InFlightRound
from paceline.rollout.scheduler import Scheduler
from paceline.rollout.stats import EngineStats, RoundRecord
from paceline.rollout.timer import DraftTimer


class Recorder:
    def __init__(self, timer: DraftTimer):
        self.stats = EngineStats()
        self.timer = timer
        self.on_round: Callable[[RoundRecord], None] | None = None
        self._started = time.perf_counter()

    def prefill(self, started: float, seconds: float, sequences: int, accepted: int, prompt_tokens: int) -> None:
        """Sequences were admitted: so many tokens were prefilled, and each sequence got its next token, behind
        `accepted` ones that were written ahead."""
        self.stats.prefill_s += seconds
        self.stats.prefill_tokens += prompt_tokens
        self.stats.decoded_tokens += sequences + accepted
        self._note(started, seconds, sequences, "prefill", sequences + accepted)

    def verified_ahead(self, written: int, accepted: int) -> None:
        """Of the tokens that were written ahead of a sequence, so many were accepted."""
        self.stats.ahead_tokens += written
        self.stats.ahead_accepted += accepted
        self.stats.ahead_flips += accepted < written

    def round(
        self, round: InFlightRound, ended: float, seconds: float, batch: int, tokens: int, accepted: list[int] | None
    ) -> None:
        """A round of `batch` sequences has been read at `ended`: it appended so many tokens, and of each sequence's
        draft so many were accepted."""
        self.stats.count(round.strategy, seconds, batch, tokens)
        if accepted is not None:
            draft_s = self.timer.seconds(round.strategy, seconds, round.timed)
            self.stats.count_draft(round.strategy, seconds, draft_s, accepted, tokens)
        self._note(ended - seconds, seconds, batch, str(round.strategy), tokens)

    def peaks(self, scheduler: Scheduler, graphs: GraphPool | None) -> None:
        stats = self.stats
        pool = scheduler.pool
        stats.paused = scheduler.paused
        stats.peak_pages = max(stats.peak_pages, pool.usable - pool.free)
        stats.graph_bytes = graphs.memory_bytes if graphs else 0

    def _note(self, started: float, seconds: float, batch: int, strategy: str, tokens: int) -> None:
        if self.on_round:
            self.on_round(RoundRecord(started - self._started, seconds, batch, strategy, tokens))
