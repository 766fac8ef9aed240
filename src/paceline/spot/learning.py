"""A worker's part in the drafter's training: what it keeps to learn from, and when it learns.

In the tail of a rollout a worker that has run dry reads the answers it has just finished (one pass of the policy, which
would have stood still otherwise) and trains on them. The learner runs the policy over every answer anyway, so what it
thinks of them comes for free there: the longest are kept for the next step's tail, in which the long answers of that
step are still missing; with `spot.when=update` all of them are kept, and trained on after the update.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.config import Config, SpotConfig
from paceline.draft.neural import NeuralDrafter
from paceline.draft.trainer import TrainSettings
from paceline.draft.training import read_texts, suitable_rate
from paceline.spot.buffer import Sample, SpotBuffer
from paceline.spot.trainer import Spell, SpotSettings, SpotTrainer

JUDGED, LITTLE = 4096, 512  # tokens that all judge by together, and each at least
GENTLE = 0.1  # of the learning rate, for a drafter that is good already: what its training ended with
ANNEAL = 500  # steps after which a new one's rate is about half of what it was
READ_AT_ONCE = 4096  # tokens, on a GPU, where a few take as long as that
READ_EVERY = 4  # steps: a tail may be short, and there is much to learn from what was read already


class DrafterLearning:
    def __init__(self, drafter: NeuralDrafter, config: SpotConfig, seed: int, workers: int = 1, warm: bool = False):
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
        self.spell = Spell()
        """What was trained since the rollout began."""
        self._steps: Iterator[Spell] | None = None  # over what is in the buffer
        self._unread: list[tuple[list[int], int]] = []
        self._prompts: Sequence[int] = ()
        self._long = 0
        self._turns = 0

    @property
    def in_tail(self) -> bool:
        return self.config.when in ("tail", "both")

    def begin_rollout(self, new_step: bool) -> None:
        """The first rollout of a step, or another one of it."""
        self.spell, self._steps = Spell(), None
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
        if not (self._unread and self._turns % READ_EVERY == 0):
            if self._steps is None:
                self._steps = self.trainer.steps()
            step = next(self._steps, None)
            if step is not None:
                self.spell += step
                return True
        if self._unread:
            self._read()
            return True
        return False

    def _read(self) -> None:
        """The longest first: they are what the tail is made of."""
        self._unread.sort(key=lambda text: len(text[0]))
        some = [self._unread.pop()]
        most = max(self.trainer.size, READ_AT_ONCE if self.trainer.drafter.fc.is_cuda else 0)
        while self._unread and sum(len(t) for t, _ in some) + len(self._unread[-1][0]) <= most:
            some.append(self._unread.pop())
        started = time.perf_counter()
        texts = read_texts(self.trainer.drafter, some)
        lengths = [len(tokens) for tokens, _ in some]
        pieces = (t.split(lengths) for t in (texts.tokens, texts.features, texts.hidden))
        for (_, prompt), tokens, features, hidden in zip(some, *pieces, strict=True):
            self.buffer.put(Sample(tokens.int(), prompt, features, hidden))
        self._steps = None  # there is more to learn from
        self.spell.seconds += time.perf_counter() - started

    def begin_update(self, prompts: Sequence[int], lengths: Sequence[int]) -> None:
        """An update is about to be made on answers of these lengths to prompts of those."""
        self._prompts = prompts
        self._long = 0 if self.config.when != "tail" else int(torch.tensor(lengths).median())
        self.buffer.forget_new()  # the learner's pass shows them again

    def watch(self, answer: int, tokens: Tensor, features: Tensor, hidden: Tensor) -> None:
        """The learner has run the policy over one of them."""
        if len(tokens) - self._prompts[answer] >= self._long:
            self.buffer.put(Sample(tokens.int(), self._prompts[answer], features, hidden))

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
