"""Carrying out an admission: prompts into pages, what was written ahead verified, and the first token of each."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Many

from paceline.core import Completion
from paceline.draft.base import BaseDrafter
from paceline.rollout.outputs import OutputProcessor
from paceline.rollout.recorder import Recorder
from paceline.rollout.runner import ModelRunner, PrefillResult
from paceline.rollout.scheduler import Admission, Scheduler
from paceline.rollout.sequence import Sequence, max_filters


class Admissions:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        drafters: Mapping[str, BaseDrafter],
        outputs: OutputProcessor,
        recorder: Recorder,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.drafters = drafters
        self.outputs = outputs
        self.recorder = recorder

    def run(self, admission: Admission, started: float) -> tuple[list[Completion], float]:
        """`started` by the clock of `time.perf_counter` -> completions that end with it, and when it was over."""
        first = len(self.scheduler.running) - len(admission.sequences)
        count = len(admission.sequences)
        prompt_tokens = sum(len(f.tokens) for f in admission.fills)  # before the sequences grow
        left = self._prefill(admission)
        done, accepted = self._append_accepted(first, left)
        filters = max_filters(self.scheduler.running[first:])
        done += self.outputs.append_first(first, self.runner.sample_first(left, first, filters))
        ended = time.perf_counter()
        self.recorder.prefill(started, ended - started, count, accepted, prompt_tokens)
        return done, ended

    def _prefill(self, admission: Admission) -> list[PrefillResult]:
        """Fill pages, and hand each new sequence what its prompt has left."""
        own: dict[int, PrefillResult] = {}
        if admission.fills:
            filters = max_filters(admission.sequences)
            for fill, filled in zip(admission.fills, self.runner.prefill(admission.fills, filters), strict=True):
                if isinstance(fill.owner, Sequence):
                    own[id(fill.owner)] = filled
                else:
                    fill.owner.filled = filled
        for page, (tokens, targets) in admission.copies.items():
            self.scheduler.pool.copy(page, targets, tokens)
        pairs = enumerate(admission.sequences)
        left = [admission.prefixes[i].filled if i in admission.prefixes else own[id(seq)] for i, seq in pairs]
        self.scheduler.release_prefixes()
        for drafter in self.drafters.values():
            drafter.begin(admission.sequences)
        return left

    def _append_accepted(self, first: int, left: Many[PrefillResult]) -> tuple[list[Completion], int]:
        """Append what was accepted of the tokens that were written ahead of the sequences from row `first` on ->
        completions that end with them, and how many tokens were appended."""
        done: list[Completion] = []
        accepted = 0
        for row, part in enumerate(left, first):
            if not (written := len(self.scheduler.running[row].ahead)):
                continue
            completion, count = self.outputs.append_accepted(row, part.accepted)
            self.recorder.verified_ahead(written, count)
            done += [completion] if completion else []
            accepted += count
        return done, accepted
