"""Training the drafter while there is time, and publishing what came of it only if it is not worse.

Training goes on in steps that are short enough to stop at any moment: a step takes as many tokens as fit into a set
time on this machine, which is measured. Some answers are never trained on; they decide about publishing.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.draft.eagle.gradients import SMALLEST, size_of
from paceline.draft.eagle.loss import PackedSequences, batches, before_completions, expected_accept_length
from paceline.draft.eagle.model import EagleModel
from paceline.draft.eagle.trainer import DrafterTrainer, TrainSettings, copy_of
from paceline.spot.buffer import FeatureSample, SpotBuffer
from paceline.spot.evaluation import Evaluation
from paceline.spot.merge import contribution, merged

LEAST, MOST = 128, 4096  # tokens of a step: from there on, more steps teach more than larger ones
AGAIN = 50  # steps
FIRST, FIRST_GPU = 128, 2048  # tokens of the very first one
JUDGES = 4  # answers, at least, that share the tokens drafters are judged by
MUCH = 0.03  # of the expected tokens per check: what is worse by more has gone astray


@dataclass(frozen=True)
class SpotSettings:
    step_s: float = 0.05
    """How long a step may take."""
    judge_tokens: int = 4096
    """Most tokens of held-out answers that are looked at to decide about publishing."""
    anneal: int | None = None
    """Steps after which the learning rate is about half; it falls to a tenth. None leaves it as it is."""


@dataclass
class TrainingStats:
    """What one stretch of training did."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    """Of the last step that was finite."""
    thrown_away: int = 0
    """Steps whose loss or gradient was not finite."""

    def __add__(self, other: TrainingStats) -> TrainingStats:
        return TrainingStats(
            self.steps + other.steps,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            other.loss if other.steps else self.loss,
            self.thrown_away + other.thrown_away,
        )


class SpotTrainer:
    def __init__(
        self,
        drafter: EagleModel,
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
        self._on_gpu = drafter.fc.is_cuda
        self._begin_anew()
        self.size = float(FIRST_GPU if self._on_gpu else FIRST)
        """Tokens of the next step."""
        self._least = self._smallest = float(SMALLEST if self._on_gpu else LEAST)
        self._last = (0, 0.0)  # tokens and seconds of the last step
        self.tokens = 0
        """Tokens trained on since the last version."""
        self._age = 0  # steps that were ever made
        self._begun = 0  # tokens of the step that was begun

    def _begin_anew(self) -> None:
        """From the drafter that guesses."""
        self._trainer = DrafterTrainer(self.drafter, self._training)
        self._known: set[int] = set()  # sizes of which there was a step: the first of each captures a graph

    @property
    def weights(self) -> list[Tensor]:
        """Those in training, in float32."""
        return self._trainer.masters

    def train(self, go_on: Callable[[], bool]) -> TrainingStats:
        """Steps for as long as `go_on` says so: it is asked before each one."""
        spell, steps = TrainingStats(), self.steps()
        while go_on():
            step = next(steps, None)
            if step is None:
                break
            spell += step
        return spell

    def steps(self) -> Iterator[TrainingStats]:
        """Steps over what the buffer holds now and the policy thinks now, again and again, each made when it is asked
        for; none if there is nothing to learn from."""
        for pack in self.packs():
            started, known = self._clock(), self._knows(pack)
            self.begin(lay_out(pack, self._on_gpu))
            spell = self.end()
            spell.seconds = self._clock() - started
            if known and spell.tokens > self.size / 2:  # what is left over at the end says little
                self._resize(spell.tokens, spell.seconds)
            yield spell

    def packs(self) -> Iterator[list[FeatureSample]]:
        """What the buffer holds now, but for what is held out, in parts of the size of a step, again and again."""
        self._trainer.copy.refresh()
        samples = [s for s in self.buffer.samples if not self._is_held_out(s)]
        while samples:
            size = int(self.size)
            pieces = [piece for sample in samples for piece in cut(sample, size, self._dice)]
            for pack in batches(pieces, size, self._dice.shuffle, len):
                yield pack
                if not size / 2 < self.size < 2 * size:  # steps have another size now
                    break

    def _knows(self, pack: list[FeatureSample]) -> bool:
        """Whether there was a step of this size: on a GPU the first captures a graph, and says nothing about others."""
        size = size_of(sum(map(len, pack))) if self._on_gpu else 0
        known = not self._on_gpu or size in self._known
        self._known.add(size)
        return known

    def begin(self, texts: PackedSequences) -> None:
        """The first half of a step, on texts that lie on the host."""
        anneal = self.settings.anneal
        self._begun = len(texts.tokens)
        self._trainer.begin(texts, 1 - anneal / (anneal + self._age) if anneal else 0.0)

    @property
    def computed(self) -> bool:
        """Whether `end` has nothing to wait for."""
        return self._trainer.computed

    def end(self) -> TrainingStats:
        """The second half."""
        before = self._trainer.steps
        loss, _ = self._trainer.end()
        if self._trainer.steps == before:
            return TrainingStats(tokens=self._begun, thrown_away=1)
        self.tokens += self._begun
        self._age += 1
        return TrainingStats(1, self._begun, loss=loss)

    def _resize(self, tokens: int, seconds: float) -> None:
        """Towards the set time, by at most a factor of two at once, because the first steps are slow for other reasons;
        but not to where smaller steps take as long as larger ones: part of a step takes the same however small it is.
        That is looked at again from time to time."""
        before, took = self._last
        if self._trainer.steps % AGAIN == 0:
            self._least = self._smallest
        if tokens <= 0.7 * before and took >= seconds > 0.8 * took:
            self._least = max(self._least, min(before, MOST))
        self._last = (tokens, seconds)
        wanted = tokens * self.settings.step_s / max(seconds, 1e-9)
        self.size = min(MOST, max(self._least, self.size / 2, min(wanted, 2 * self.size)))
        if self._on_gpu:  # graphs come in powers of two
            self.size = 2.0 ** int(math.log2(self.size))

    def judge(self) -> Evaluation:
        """The published drafter against the one in training."""
        return self.judge_candidate(self.weights)

    def judge_candidate(self, weights: list[Tensor]) -> Evaluation:
        """The published drafter against one with these weights, on answers that this worker has trained neither on."""
        held_out: list[FeatureSample] = []
        left = self.settings.judge_tokens
        for sample in reversed(self.buffer.samples):  # the latest policy's first
            if self._is_held_out(sample):
                part = excerpt(sample, self.settings.judge_tokens // JUDGES)
                if len(part) <= left:
                    held_out.append(part)
                    left -= len(part)
        if not held_out:
            return Evaluation(0.0, 0.0, 0)
        texts, runs = lay_out(held_out, self._on_gpu).to(self.drafter.fc.device), self._training.runs
        before, after = (
            expected_accept_length(drafter, texts, runs) for drafter in (self.drafter, copy_of(self.drafter, weights))
        )
        return Evaluation(before, after, int(texts.learn.sum()))

    def adopt(self, weights: list[Tensor] | None) -> None:
        """Make these weights the drafter that guesses and the one that training goes on from; or, with None, drop what
        was trained and go back to the last version."""
        if weights is not None:
            self._trainer.replace(weights)
            self._trainer.publish()
            self.version += 1
        elif self.tokens:
            self._begin_anew()
        self.tokens = 0

    def settle(self, candidate: list[Tensor], verdict: Evaluation) -> None:
        """Adopt a candidate that is not worse. One that is a little worse may become better: training goes on from it.
        One that is much worse is thrown away."""
        if verdict.better:
            self.adopt(candidate)
        elif not verdict.after > (1 - MUCH) * verdict.before:
            self.adopt(None)

    def restart(self, version: int) -> None:
        """The drafter is another one now: begin anew from it."""
        self._begin_anew()
        self.version, self.tokens = version, 0

    def publish(self) -> Evaluation | None:
        """What workers do together, done alone: make what was trained the drafter that guesses, if it is not worse, or
        else go back to the last version. None if nothing was trained, or if there is nothing to judge it by; then
        training goes on, and the next time decides."""
        if not self.tokens:
            return None
        candidate = merged(contribution(self))
        if candidate is None:  # it is not finite
            self.adopt(None)
            return None
        verdict = self.judge_candidate(candidate)
        if not verdict.tokens:
            return None
        self.settle(candidate, verdict)
        return verdict

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that training goes on with after a resume, for safetensors and for JSON. The published drafter is saved
        by whoever saves the policy, and the answers in the buffer are not: the next step brings new ones."""
        tensors, values = self._trainer.state()
        version, numbers, gauss = self._dice.getstate()
        return tensors, {
            "trainer": values,
            "version": self.version,
            "tokens": self.tokens,
            "size": self.size,
            "age": self._age,
            "dice": [version, list(numbers), gauss],
            "seen": self.buffer.seen,
        }

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self._trainer.load(tensors, values["trainer"])
        self.version, self.tokens, self.size = values["version"], values["tokens"], values["size"]
        self._age = values["age"]
        version, numbers, gauss = values["dice"]
        self._dice.setstate((version, tuple(numbers), gauss))
        self.buffer.seen = values["seen"]

    def _is_held_out(self, sample: FeatureSample) -> bool:
        return sample.held_out


def cut(sample: FeatureSample, size: int, dice: random.Random) -> list[FeatureSample]:
    """A long answer in pieces of the size of a step, cut at other places each time, so that a step takes the time that
    it may and all of the answer is learned from. Where tokens lie in a text is nothing that a drafter knows."""
    if len(sample) <= size:
        return [sample]
    first = max(0, sample.prompt - size // 2)  # of a long prompt, its end
    edges = [first, *range(first + dice.randint(size // 2 + 2, size), len(sample), size), len(sample)]
    pieces = (_piece(sample, *ends) for ends in itertools.pairwise(edges))
    return [piece for piece in pieces if len(piece) > piece.prompt]


def excerpt(sample: FeatureSample, size: int) -> FeatureSample:
    """An answer that is longer than that, from a place on that is always the same."""
    if len(sample) <= size:
        return sample
    first = max(0, sample.prompt - size // 2)
    last = max(first, len(sample) - size)
    first += int(sample.tokens.sum()) % (last - first + 1)
    return _piece(sample, first, min(len(sample), first + size))


def _piece(sample: FeatureSample, first: int, last: int) -> FeatureSample:
    """What the policy thought before its first token is not known, so nothing is learned there."""
    return sample.part(first, last, sample.prompt if first == 0 else max(2, sample.prompt - first))


def lay_out(samples: list[FeatureSample], pin: bool = False) -> PackedSequences:
    """Samples end to end, on the host; pinned there, so that a GPU fetches them by itself."""
    count = sum(map(len, samples))

    def joined(parts: list[Tensor]) -> Tensor:
        room = torch.empty(count, *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=pin)
        return torch.cat(parts, out=room)

    return PackedSequences(
        tokens=joined([s.tokens.long() for s in samples]),
        place=joined([torch.arange(len(s)) for s in samples]),
        features=joined([s.features for s in samples]),
        hidden=joined([s.hidden for s in samples]),
        learn=before_completions([len(s) for s in samples], [s.prompt for s in samples]),
    )
