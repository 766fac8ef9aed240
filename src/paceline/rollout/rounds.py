"""Rounds: draft and verify, or plain decoding, for all running sequences.

Where the device can go on without the host, the next round is launched before the last one is read, so that the device
never waits: at most one round is in flight while the next is being launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from paceline.core import Completion
from paceline.draft.base import BaseDrafter, DeviceDrafter
from paceline.draft.decision import BatchContext, Choice, RoundOutcome
from paceline.draft.stragglers import slowest
from paceline.draft.strategy import Strategy
from paceline.draft.tuner import Tuner
from paceline.rollout.in_flight import InFlightRound
from paceline.rollout.outputs import OutputProcessor
from paceline.rollout.recorder import Recorder
from paceline.rollout.runner import ModelRunner, PassRows
from paceline.rollout.scheduler import Scheduler
from paceline.rollout.sequence import max_filters

RESERVED_ROUNDS = 4  # rounds for which pages are reserved, if there are enough, so that launching ahead need not wait


class Rounds:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        drafters: Mapping[str, BaseDrafter],
        tuner: Tuner,
        outputs: OutputProcessor,
        recorder: Recorder,
        overlap: bool,
    ):
        """`overlap` tells whether a round may be launched before the last one was read."""
        self.scheduler = scheduler
        self.runner = runner
        self.drafters = drafters
        self.tuner = tuner
        self.outputs = outputs
        self.recorder = recorder
        self.overlap = overlap
        self.choose: Callable[[int], Strategy] | None = None
        """Instead of the tuner, picks the strategy of a round from the number of running sequences."""
        self.in_flight: InFlightRound | None = None
        self._next: Choice | None = None  # for the next round, if it has been asked for already
        self._follow_every = 2 if runner.model.device.type == "cuda" else 8
        self._unfollowed = 0  # rounds since drafters have read the sequences
        self.last_read = 0.0
        """When the last round was read, by the clock of `time.perf_counter`."""

    def run(self) -> list[Completion]:
        """Finish the round in flight, or one that is launched now, and launch the next one before, if that is
        possible."""
        current = self.in_flight or self.launch()
        following = self.launch_ahead(current)
        self._while_busy()
        done = self.finish(current, following is not None)
        self.in_flight = following
        return done

    def launch(self) -> InFlightRound:
        """Launch a round with the rows that the host has."""
        choice = self._next or self._ask()
        self._next = None
        strategy = choice.strategy
        started = time.perf_counter()
        captured = self._captured
        # Reserving pages may pause some sequences.
        self.scheduler.reserve(strategy.num_verified * (RESERVED_ROUNDS if self.overlap else 1))
        running = self.scheduler.running
        rows = PassRows(len(running), max_filters(running), version=self.scheduler.changes)
        if strategy.plain:
            return InFlightRound(choice, self.runner.decode(rows), started, self._captured > captured)
        drafter = self.drafters[strategy.drafter]
        catch_up_rows = drafter.catch_up_rows(self.runner.shape(rows.sequences))
        timed = self.recorder.timer.begin(strategy)
        self.runner.propose(rows, drafter, strategy, running)
        self.recorder.timer.drafted()
        # A drafter on the device has uploaded the rows.
        output = self.runner.verify(rows._replace(upload=not drafter.on_device), strategy)
        return InFlightRound(choice, output, started, self._captured > captured, catch_up_rows, timed)

    def launch_ahead(self, current: InFlightRound) -> InFlightRound | None:
        """Launch the next round before the current one is read, if the device knows all that it takes: the same
        sequences go on, with drafts that it makes itself, and with pages for both rounds. What a sequence that ends
        with the first of them samples in the second is dropped."""
        running = self.scheduler.running
        count = len(running)
        if not self.overlap or self.outputs.ended_rows or (self.scheduler.waiting and count < self.scheduler.max_batch):
            return None
        if not current.strategy.plain and not self.drafters[current.strategy.drafter].on_device:
            return None
        choice = self._next = self._next or self._ask()
        strategy = choice.strategy
        if strategy.drafter != current.strategy.drafter:
            return None
        new = current.strategy.num_verified + strategy.num_verified
        page_size = self.scheduler.pool.page_size
        if min(len(s.pages) * page_size - len(s.tokens) for s in running) < new:
            return None
        self._next = None
        started = time.perf_counter()
        captured = self._captured
        rows = PassRows(count, max_filters(running), upload=False)
        if strategy.plain:
            output = self.runner.decode(rows)
        else:
            self.runner.propose(rows, self.drafters[strategy.drafter], strategy)
            output = self.runner.verify(rows, strategy)
        return InFlightRound(choice, output, started, self._captured > captured)

    def finish(self, round: InFlightRound, in_flight: bool) -> list[Completion]:
        """Read a round and append what it sampled; `in_flight` tells whether the next one was launched already."""
        strategy = round.strategy
        sampled = round.output.read()
        batch = len(sampled.num_tokens)
        ended = set(self.outputs.ended_rows)
        if not strategy.plain:
            drafter = self.drafters[strategy.drafter]
            if isinstance(drafter, DeviceDrafter):
                drafter.round_read(batch)
            if not strategy.shared:  # where few were verified, few were accepted
                self.outputs.rows.count_accepted(np.asarray(sampled.num_tokens) - 1, strategy.depth)
        done, appended = self.outputs.append(sampled, in_flight)
        now = time.perf_counter()
        # A round that was launched before the last one was read has waited for it.
        seconds = now - max(round.started, self.last_read)
        self.last_read = now
        num_tokens = sampled.num_tokens
        if ended:
            num_tokens = [n for row, n in enumerate(num_tokens) if row not in ended]
            if not num_tokens:
                return done
        accepted = None if strategy.plain else [n - 1 for n in num_tokens]
        lengths = [len(completion.tokens) for completion in done]
        self.tuner.observe(
            RoundOutcome(round.choice, batch, seconds, accepted, round.captured, round.catch_up_rows, lengths)
        )
        self.recorder.round(round, now, seconds, len(num_tokens), appended, accepted)
        self.recorder.peaks(self.scheduler, self.runner.graphs)
        return done

    def drain(self) -> None:
        """Forget the round in flight, if there is one, and let go of sequences that are complete."""
        self.in_flight = None
        self.outputs.remove_ended()

    def _while_busy(self) -> None:
        """While the device is busy: let drafters read what was appended, which is cheaper for several rounds at once.
        On a CPU nothing runs meanwhile, so there it is done seldom."""
        self._unfollowed += 1
        if self._unfollowed >= self._follow_every:
            self._unfollowed = 0
            for drafter in self.drafters.values():
                drafter.follow(self.scheduler.running)

    def _ask(self) -> Choice:
        batch = len(self.scheduler.running)
        return Choice(self.choose(batch)) if self.choose else self.tuner.choose(self._context(batch))

    def _context(self, batch: int) -> BatchContext:
        rows = self.outputs.rows
        shape = self.runner.shape(batch)
        left = (rows.ends[:batch] - rows.context[:batch]).mean() - 1  # the last token is not in the KV cache yet
        catch_up_rows = {name: d.catch_up_rows(shape) for name, d in self.drafters.items()}
        served = bool(self.scheduler.waiting)
        ratio = None if served else slowest(rows.reached[:batch], rows.accepted[:batch])
        return BatchContext(batch, float(left), catch_up_rows, ratio, served)

    @property
    def _captured(self) -> int:
        return self.runner.graphs.captured if self.runner.graphs else 0
