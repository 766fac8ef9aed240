"""Training the drafter while there is time, and publishing what came of it only if it is not worse.

Training goes on in steps that are short enough to stop at any moment: a step takes as many tokens as fit into a set
time on this machine, which is measured. Some answers are never trained on; they decide about publishing.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.draft.neural import NeuralDrafter
from paceline.draft.training import (
    DrafterTrainer,
    Texts,
    TrainSettings,
    batches,
    before_answers,
    expected_accept_length,
)
from paceline.spot.buffer import Sample, SpotBuffer

LEAST, MOST = 128, 16384  # tokens of a step


@dataclass(frozen=True)
class SpotSettings:
    step_s: float = 0.05
    """How long a step may take."""
    held_out: int = 8
    """One answer in so many is kept for the decision to publish."""
    judge_tokens: int = 4096
    """Most tokens of those that are looked at."""


@dataclass
class Spell:
    """What one stretch of training did."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    """Of the last step that was finite."""
    thrown_away: int = 0
    """Steps whose loss or gradient was not finite."""


class Verdict(NamedTuple):
    """Expected tokens per check."""

    before: float
    after: float

    @property
    def better(self) -> bool:
        return self.after >= self.before


class SpotTrainer:
    def __init__(
        self,
        drafter: NeuralDrafter,
        buffer: SpotBuffer,
        training: TrainSettings | None = None,
        settings: SpotSettings | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.drafter, self.buffer = drafter, buffer
        self.settings = settings or SpotSettings()
        self.version = 0
        self._training = training or TrainSettings()
        self._dice, self._clock = random.Random(seed), clock
        self._trainer = DrafterTrainer(drafter, self._training)
        self._size = float(4 * LEAST)  # tokens of the next step
        self._trained = 0  # steps since the last version

    def train(self, go_on: Callable[[], bool]) -> Spell:
        """Steps over what the buffer holds now, again and again, for as long as `go_on` says so: it is asked before
        each one."""
        spell = Spell()
        samples = [s for s in self.buffer.samples if not self._is_held_out(s)]
        while samples:
            for pack in batches(samples, int(self._size), self._dice.shuffle, len):
                if not go_on():
                    return spell
                self._step(pack, spell)
        return spell

    def _step(self, pack: list[Sample], spell: Spell) -> None:
        started = self._clock()
        before = self._trainer.steps
        # A long answer is cut to the size of a step, or it would make one of its own length.
        pack = [s if len(s) <= self._size else s.first(max(s.prompt + 1, int(self._size))) for s in pack]
        loss, _ = self._trainer.step(texts_of(pack, self.drafter))
        seconds, tokens = self._clock() - started, sum(map(len, pack))
        if self._trainer.steps > before:
            spell.steps, spell.loss = spell.steps + 1, loss
            self._trained += 1
        else:
            spell.thrown_away += 1
        spell.tokens, spell.seconds = spell.tokens + tokens, spell.seconds + seconds
        if tokens > self._size / 2:  # what is left over at the end says little
            # Towards the set time, by at most a factor of two at once: the first steps are slow for other reasons.
            wanted = tokens * self.settings.step_s / max(seconds, 1e-9)
            self._size = min(MOST, max(LEAST, self._size / 2, min(wanted, 2 * self._size)))

    def judge(self) -> Verdict | None:
        """The published drafter against the one in training, on answers that neither was trained on; None if there are
        none."""
        held_out: list[Sample] = []
        tokens = 0
        for sample in reversed(self.buffer.samples):  # the latest policy's first
            if self._is_held_out(sample) and tokens + len(sample) <= self.settings.judge_tokens:
                held_out.append(sample)
                tokens += len(sample)
        if not held_out:
            return None
        texts = texts_of(held_out, self.drafter)
        runs = self._training.runs
        return Verdict(*(expected_accept_length(d, texts, runs) for d in (self.drafter, self._trainer.copy)))

    def publish(self) -> Verdict | None:
        """Make what was trained the drafter that guesses, if it is not worse; otherwise go back to the last version.
        None if nothing was trained, or if there is nothing to judge it by."""
        if not self._trained:
            return None
        self._trained = 0
        verdict = self.judge()
        if verdict is not None and verdict.better:
            self._trainer.publish()
            self.version += 1
        else:
            self._trainer = DrafterTrainer(self.drafter, self._training)
        return verdict

    def _is_held_out(self, sample: Sample) -> bool:
        return zlib.crc32(sample.tokens.numpy().tobytes()) % self.settings.held_out == 0


def texts_of(samples: list[Sample], drafter: NeuralDrafter) -> Texts:
    """Samples end to end, on the drafter's device."""
    device = drafter.fc.device
    learn = before_answers([len(s) for s in samples], [s.prompt for s in samples])
    return Texts(
        tokens=torch.cat([s.tokens for s in samples]).long().to(device),
        place=torch.cat([torch.arange(len(s)) for s in samples]).to(device),
        features=torch.cat([s.features for s in samples]).to(device),
        hidden=torch.cat([s.hidden for s in samples]).to(device),
        learn=learn.to(device),
    )
