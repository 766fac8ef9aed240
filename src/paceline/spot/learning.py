"""A worker's part in the drafter's training: what it keeps to learn from, and when it learns.

In the tail of a rollout a worker that has run dry runs the policy over the answers it has just finished (one pass of
the policy, which would have stood still otherwise) and trains on them. The learner runs the policy over every answer
anyway, so features and hidden states come for free there: the longest are kept for the next step's tail, in which the
long answers of that step are still missing; with `spot.when=update` all of them are kept, and trained on after the
update. Which answers the buffer can take is asked of all of them before the policy runs over the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core import Spans, moved
from paceline.draft.eagle.loss import read_sequences, suitable_rate
from paceline.draft.eagle.trainer import TrainSettings
from paceline.spot.buffer import SpotBuffer
from paceline.spot.trainer import SpotSettings, SpotTrainer, TrainingStats
from paceline.spot.when import WARM_RATE

if TYPE_CHECKING:
    from paceline.config import SpotConfig
    from paceline.draft.eagle.loss import PackedSequences
    from paceline.draft.eagle.model import EagleModel
    from paceline.spot.partition import BufferEntry

EVAL_TOKENS = 4096  # that drafters are evaluated on by all workers together: some hundred draft tokens decide
MIN_EVAL_TOKENS = 512  # and by each worker at least
ANNEAL_STEPS = 500  # after which a new drafter's rate is about half of what it was
READ_TOKENS_GPU = 4096  # that the policy runs over at once on a GPU, where fewer take as long
READ_EVERY = 4  # steps: a tail may be short, and there is much to learn from what was read already

PromptAndAnswer = tuple[Sequence[int], int]
"""Tokens of a prompt and its answer, and how many of them are the prompt."""
Reader = Callable[["EagleModel", list[tuple[list[int], int]]], "PackedSequences"]
"""Runs the policy over such answers and keeps what a drafter learns from."""


class DrafterLearning:
    def __init__(
        self,
        drafter: EagleModel,
        config: SpotConfig,
        seed: int,
        workers: int = 1,
        warm: bool = False,
        reader: Reader | None = None,
    ):
        """One of so many workers. A `warm` drafter was trained before: large steps would first of all undo that.
        `reader` runs the policy over answers where its decoder does not."""
        self.config = config
        self.buffer = SpotBuffer(int(config.buffer_mb * 2**20))
        rate = config.drafter_lr or suitable_rate(drafter.policy) * (WARM_RATE if warm else 1.0)
        settings = SpotSettings(
            step_s=config.step_ms / 1e3,
            eval_tokens=max(MIN_EVAL_TOKENS, EVAL_TOKENS // workers),
            anneal=None if warm else ANNEAL_STEPS,
        )
        runs = drafter.shape.block or TrainSettings.runs
        training = TrainSettings(lr=rate, runs=runs, grow=not warm, loss=config.loss)
        self.trainer = SpotTrainer(drafter, self.buffer, training, settings, seed)
        self.stats = TrainingStats()
        """What was trained since the rollout began."""
        self._reader = reader
        self._steps: Iterator[TrainingStats] | None = None  # over what is in the buffer
        self._finished: list[tuple[list[int], int, Spans]] = []  # answers that the buffer was not asked about yet
        self._unread: list[BufferEntry] = []  # reserved, longest last
        self._entries: dict[int, BufferEntry] = {}  # of answers that the learner runs the policy over
        self._width = (drafter.fc.shape[1] + drafter.policy.config.hidden_size) * drafter.policy.dtype.itemsize
        self._calls = 0  # of `step`

    @property
    def in_tail(self) -> bool:
        return self.config.when in ("tail", "both")

    def begin_rollout(self, new_step: bool) -> None:
        """The first rollout of a step, or another one of it."""
        self.stats = TrainingStats()
        self._steps = None
        if new_step:
            self.buffer.next_step()
            self._finished.clear()
            self._unread.clear()

    def finished(self, prompt: Sequence[int], tokens: Sequence[int], observed: Spans = ()) -> None:
        """An answer is there; the policy runs over it when there is time. Nothing is learned about those of its tokens
        that were `observed`."""
        if self.in_tail:
            spans = moved(observed, len(prompt), len(prompt) + len(tokens))
            self._finished.append(([*prompt, *tokens], len(prompt), spans))

    def step(self) -> bool:
        """Read some answers, or train once, either for no longer than the set time -> whether there was anything."""
        self._calls += 1
        if self._calls % READ_EVERY == 0 and self.read_some():
            return True
        if self._steps is None:
            self._steps = self.trainer.steps()
        step = next(self._steps, None)
        if step is not None:
            self.stats += step
            return True
        return self.read_some()

    def read_some(self) -> bool:
        """Run the policy over some answers, the longest first: they are what the tail is made of. One that the buffer
        cannot take is not read, and of one that it keeps a part of, only that -> whether there was any."""
        self._reserve_finished()
        self._unread = [entry for entry in self._unread if not entry.evicted]
        if not self._unread:
            return False
        self._steps = None  # there is more to learn from, and they hold references to what is evicted for it
        most = max(self.trainer.step_size.tokens, READ_TOKENS_GPU if self.trainer.drafter.fc.is_cuda else 0)
        entries = [self._unread.pop()]
        while self._unread and sum(map(len, entries)) + len(self._unread[-1]) <= most:
            entries.append(self._unread.pop())
        started = time.perf_counter()
        read = (self._reader or read_sequences)(
            self.trainer.drafter, [(entry.tokens.tolist(), entry.prompt) for entry in entries]
        )
        parts = (t.split([len(entry) for entry in entries]) for t in (read.features, read.hidden))
        for entry, features, hidden in zip(entries, *parts, strict=True):
            self.buffer.fill(entry, features, hidden)
        self.stats.seconds += time.perf_counter() - started
        return True

    def _reserve_finished(self) -> None:
        """Ask the buffer about all answers at once, so that none is read that has to leave for another of them."""
        if not self._finished:
            return
        self._steps = None  # they hold references to what is evicted
        self._finished.sort(key=lambda answer: -len(answer[0]))
        reserved = [self.buffer.reserve(tokens, prompt, self._width, spans) for tokens, prompt, spans in self._finished]
        self._finished.clear()
        self._unread += [entry for entry in reserved if entry is not None]
        self._unread.sort(key=len)

    def begin_update(
        self,
        lengths: Sequence[int],
        answers: Mapping[int, PromptAndAnswer],
        first: bool,
        observed: Mapping[int, Spans] | None = None,
    ) -> None:
        """The learner is about to run the policy over these answers, by their index, of a step that has answers of
        those lengths; for the first time in this step, or for more of them. Of some, positions were `observed`. Can be
        repeated."""
        self._steps = None  # they hold references to what is evicted
        if first:
            self.buffer.begin_again()  # all that this step has read comes again
            self._entries.clear()
        unfilled = [index for index, entry in self._entries.items() if entry.sample is None]
        for index in unfilled:  # those that were to come and did not, because a worker died on the way
            self.buffer.give_back(self._entries.pop(index))
        only_tail = self.config.when == "tail" and not self.config.invest
        shortest = int(torch.tensor(lengths).median()) if only_tail else 0
        for index, (tokens, prompt) in sorted(answers.items(), key=lambda item: -len(item[1][0])):
            if index in self._entries:
                continue
            if len(tokens) - prompt < shortest:
                self.buffer.offered += 1
                continue
            entry = self.buffer.reserve(tokens, prompt, self._width, (observed or {}).get(index, ()))
            if entry is not None:
                self._entries[index] = entry

    def wants_hidden(self, index: int) -> bool:
        """Whether the buffer takes an answer's hidden states, and they are not there yet."""
        entry = self._entries.get(index)
        return entry is not None and entry.sample is None and not entry.evicted

    def on_hidden(self, index: int, tokens: Tensor, features: Tensor, hidden: Tensor) -> None:
        """The learner has run the policy over one of them."""
        if self.wants_hidden(index):
            self.buffer.fill(self._entries[index], features, hidden)

    def train_for(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        self.stats += self.trainer.train(lambda: time.perf_counter() < end)
