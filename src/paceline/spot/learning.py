"""A worker's part in the drafter's training: what it keeps to learn from, and when it learns.

In the tail of a rollout a worker that has run dry reads the answers it has just finished (one pass of the policy, which
would have stood still otherwise) and trains on them. The learner runs the policy over every answer anyway, so what it
thinks of them comes for free there: the longest are kept for the next step's tail, in which the long answers of that
step are still missing; with `spot.when=update` all of them are kept, and trained on after the update. Which answers the
buffer has room for is asked before the policy runs over them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paceline.config import Config, SpotConfig
from paceline.draft.eagle.loss import read_sequences, suitable_rate
from paceline.draft.eagle.model import EagleModel
from paceline.draft.eagle.trainer import TrainSettings
from paceline.spot.buffer import BufferEntry, SpotBuffer
from paceline.spot.trainer import SpotSettings, SpotTrainer, TrainingStats

JUDGED, LITTLE = 4096, 512  # tokens that all judge by together, and each at least
GENTLE = 0.1  # of the learning rate, for a drafter that is good already: what its training ended with
ANNEAL = 500  # steps after which a new one's rate is about half of what it was
READ_AT_ONCE = 4096  # tokens, on a GPU, where a few take as long as that
READ_EVERY = 4  # steps: a tail may be short, and there is much to learn from what was read already

Text = tuple[Sequence[int], int]
"""Tokens of a prompt and its answer, and how many of them are the prompt."""


class DrafterLearning:
    def __init__(self, drafter: EagleModel, config: SpotConfig, seed: int, workers: int = 1, warm: bool = False):
        """One of so many workers. A `warm` drafter was trained before: large steps would first of all undo that."""
        self.config = config
        self.buffer = SpotBuffer(int(config.buffer_mb * 2**20))
        rate = config.drafter_lr or suitable_rate(drafter.policy) * (GENTLE if warm else 1.0)
        settings = SpotSettings(
            step_s=config.step_ms / 1e3,
            judge_tokens=max(LITTLE, JUDGED // workers),
            anneal=None if warm else ANNEAL,
        )
        self.trainer = SpotTrainer(drafter, self.buffer, TrainSettings(lr=rate, loss=config.loss), settings, seed)
        self.spell = TrainingStats()
        """What was trained since the rollout began."""
        self._steps: Iterator[TrainingStats] | None = None  # over what is in the buffer
        self._unread: list[tuple[list[int], int]] = []
        self._places: dict[int, BufferEntry] = {}  # for answers that the learner runs the policy over
        self._width = (drafter.fc.shape[1] + drafter.policy.config.hidden_size) * drafter.policy.dtype.itemsize
        self._turns = 0

    @property
    def in_tail(self) -> bool:
        return self.config.when in ("tail", "both")

    def begin_rollout(self, new_step: bool) -> None:
        """The first rollout of a step, or another one of it."""
        self.spell, self._steps = TrainingStats(), None
        if new_step:
            self.buffer.next_step()
            self._unread.clear()

    def finished(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """An answer is there; it is read when there is time."""
        if self.in_tail:
            self._unread.append(([*prompt, *tokens], len(prompt)))

    def step(self) -> bool:
        """Read some answers, or train once, either for no longer than the set time -> whether there was anything."""
        self._turns += 1
        if self._turns % READ_EVERY == 0 and self._read():
            return True
        if self._steps is None:
            self._steps = self.trainer.steps()
        step = next(self._steps, None)
        if step is not None:
            self.spell += step
            return True
        return self._read()

    def _read(self) -> bool:
        """Run the policy over some answers, the longest first: they are what the tail is made of. One that the buffer
        has no room for is not read, and of one that it keeps a part of, only that -> whether there was any."""
        if not self._unread:
            return False
        self._steps = None  # there is more to learn from, and they hold on to what makes room for it
        self._unread.sort(key=lambda text: len(text[0]))
        most = max(self.trainer.size, READ_AT_ONCE if self.trainer.drafter.fc.is_cuda else 0)
        places: list[BufferEntry] = []
        while self._unread and (not places or sum(map(len, places)) + len(self._unread[-1][0]) <= most):
            place = self.buffer.reserve(*self._unread.pop(), self._width)
            if place is not None:
                places.append(place)
        if not places:
            return False
        started = time.perf_counter()
        texts = read_sequences(self.trainer.drafter, [(place.tokens.tolist(), place.prompt) for place in places])
        pieces = (t.split([len(place) for place in places]) for t in (texts.features, texts.hidden))
        for place, features, hidden in zip(places, *pieces, strict=True):
            self.buffer.fill(place, features, hidden)
        self.spell.seconds += time.perf_counter() - started
        return True

    def begin_update(self, lengths: Sequence[int], texts: Mapping[int, Text], first: bool) -> None:
        """The learner is about to run the policy over these answers, by their numbers, of a step that has answers of
        those lengths; for the first time in this step, or for more of them. Can be repeated."""
        self._steps = None  # they hold on to what makes room
        if first:
            self.buffer.begin_again()  # all that this step has read is shown again
            self._places.clear()
        unfilled = [answer for answer, place in self._places.items() if place.sample is None]
        for answer in unfilled:  # those that were to be shown and were not, because a worker died on the way
            self.buffer.give_back(self._places.pop(answer))
        least = int(torch.tensor(lengths).median()) if self.config.when == "tail" else 0
        for answer, (tokens, prompt) in sorted(texts.items(), key=lambda item: -len(item[1][0])):
            if answer in self._places:
                continue
            if len(tokens) - prompt < least:
                self.buffer.offered += 1
                continue
            place = self.buffer.reserve(tokens, prompt, self._width)
            if place is not None:
                self._places[answer] = place

    def wants_hidden(self, answer: int) -> bool:
        """Whether there is room for what the policy thinks of an answer, and it is not there yet."""
        return answer in self._places and self._places[answer].sample is None

    def on_hidden(self, answer: int, tokens: Tensor, features: Tensor, hidden: Tensor) -> None:
        """The learner has run the policy over one of them."""
        if self.wants_hidden(answer):
            self.buffer.fill(self._places[answer], features, hidden)

    def spend(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        self.spell += self.trainer.train(lambda: time.perf_counter() < end)


def when_to_train(config: Config, has_drafter: bool) -> str:
    """What `spot.when` means for a run."""
    when, workers = config.spot.when, config.cluster.workers
    if when != "auto":
        return when
    if not has_drafter:
        return "off"
    if workers > 1:
        return "tail"
    # Nobody is idle, so it costs time, which a drafter that is good already has hardly won back where it was measured.
    return "update" if config.speculation.drafter == "new" else "off"
