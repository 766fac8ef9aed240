"""Training the drafter while there is time, and publishing what came of it only if it is not worse.

`SpotTrainer` decides what to train on, for how long, and what becomes of the result; the gradient steps themselves are
`draft.eagle.trainer.EagleTrainer`'s, which knows neither time nor versions. Training goes in steps that are short
enough to stop at any moment: a step takes as many tokens as fit into a set time on this machine, which is measured.
Some answers are never trained on; they decide about publishing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.draft.eagle.loss import PackedSequences, batches
from paceline.draft.eagle.trainer import EagleTrainer, TrainSettings
from paceline.spot.held_out import choose_excerpts, evaluate
from paceline.spot.merge import contribution, merged
from paceline.spot.samples import FeatureSample, cut, lay_out
from paceline.spot.step_size import StepSize

if TYPE_CHECKING:
    from paceline.draft.eagle.model import EagleModel
    from paceline.spot.buffer import SpotBuffer
    from paceline.spot.evaluation import Evaluation

MAX_ACCEPT_DROP = 0.03  # of the expected accept length: a candidate that lost more has gone astray and is dropped


@dataclass(frozen=True)
class SpotSettings:
    step_s: float = 0.05
    """How long a step may take."""
    eval_tokens: int = 4096
    """Most tokens of held-out answers by which publishing is decided."""
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
    discarded: int = 0
    """Steps whose loss or gradient was not finite."""

    def __add__(self, other: TrainingStats) -> TrainingStats:
        return TrainingStats(
            self.steps + other.steps,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            other.loss if other.steps else self.loss,
            self.discarded + other.discarded,
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
        self.drafter = drafter
        self.buffer = buffer
        self.settings = settings or SpotSettings()
        self.version = 0
        self.tokens = 0
        """Tokens trained on since the last version."""
        self.step_size = StepSize(self.settings.step_s, drafter.fc.is_cuda)
        self._training = training or TrainSettings()
        self._rng = random.Random(seed)
        self._clock = clock
        self._steps_made = 0  # ever, by which the learning rate is annealed
        self._begun = 0  # tokens of the step that was begun
        self._begin_anew()

    def _begin_anew(self) -> None:
        """From the published drafter."""
        self._optimizer = EagleTrainer(self.drafter, self._training)
        self.step_size.forget_graphs()

    @property
    def weights(self) -> list[Tensor]:
        """Those in training, in float32."""
        return self._optimizer.masters

    def train(self, go_on: Callable[[], bool]) -> TrainingStats:
        """Steps for as long as `go_on` says so: it is asked before each one."""
        stats = TrainingStats()
        steps = self.steps()
        while go_on():
            step = next(steps, None)
            if step is None:
                break
            stats += step
        return stats

    def steps(self) -> Iterator[TrainingStats]:
        """Steps over what the buffer holds now, under the policy as it is now, again and again, each made when it is
        asked for; none if there is nothing to learn from."""
        for pack in self.packs():
            started = self._clock()
            measurable = self.step_size.is_measurable(sum(map(len, pack)))
            self.begin(lay_out(pack, self.step_size.on_gpu))
            step = self.end()
            step.seconds = self._clock() - started
            if measurable:
                self.step_size.adjust(step.tokens, step.seconds, self._optimizer.steps)
            yield step

    def packs(self) -> Iterator[list[FeatureSample]]:
        """What the buffer holds now, but for what is held out, in parts of the size of a step, again and again."""
        self._optimizer.copy.refresh()
        samples = [s for s in self.buffer.samples if not self._is_held_out(s)]
        while samples:
            size = int(self.step_size.tokens)
            pieces = [piece for sample in samples for piece in cut(sample, size, self._rng)]
            for pack in batches(pieces, size, self._rng.shuffle, len):
                yield pack
                if not size / 2 < self.step_size.tokens < 2 * size:  # steps have another size now
                    break

    def begin(self, sequences: PackedSequences) -> None:
        """The first half of a step, on sequences that lie on the host."""
        anneal = self.settings.anneal
        self._begun = len(sequences.tokens)
        self._optimizer.begin(sequences, 1 - anneal / (anneal + self._steps_made) if anneal else 0.0)

    @property
    def computed(self) -> bool:
        """Whether `end` has nothing to wait for."""
        return self._optimizer.computed

    def end(self) -> TrainingStats:
        """The second half."""
        before = self._optimizer.steps
        loss, _ = self._optimizer.end()
        if self._optimizer.steps == before:
            return TrainingStats(tokens=self._begun, discarded=1)
        self.tokens += self._begun
        self._steps_made += 1
        return TrainingStats(1, self._begun, loss=loss)

    def evaluate(self, candidate: list[Tensor] | None = None) -> Evaluation:
        """The published drafter against one with these weights, or against the one in training, on answers that this
        worker has trained neither on."""
        latest_first = reversed(self.buffer.samples)
        held_out = choose_excerpts(filter(self._is_held_out, latest_first), self.settings.eval_tokens)
        return evaluate(self.drafter, candidate or self.weights, held_out, self._training.runs)

    def adopt(self, weights: list[Tensor] | None) -> None:
        """Publish these weights and train on from them; or, with None, drop what was trained and go back to the last
        version."""
        if weights is not None:
            self._optimizer.replace(weights)
            self._optimizer.publish()
            self.version += 1
        elif self.tokens:
            self._begin_anew()
        self.tokens = 0

    def accept_or_drop(self, candidate: list[Tensor], evaluation: Evaluation) -> None:
        """Adopt a candidate that is not worse. One that is a little worse may become better: training goes on from it.
        One that is much worse is dropped."""
        if evaluation.better:
            self.adopt(candidate)
        elif not evaluation.after > (1 - MAX_ACCEPT_DROP) * evaluation.before:
            self.adopt(None)

    def restart(self, version: int) -> None:
        """The drafter is another one now: begin anew from it."""
        self._begin_anew()
        self.version = version
        self.tokens = 0

    def publish(self) -> Evaluation | None:
        """What workers do together, done alone: publish what was trained if it is not worse, or else go back to the
        last version. None if nothing was trained, or if no answer is held out; then training goes on, and the next
        time decides."""
        if not self.tokens:
            return None
        candidate = merged(contribution(self))
        if candidate is None:  # it is not finite
            self.adopt(None)
            return None
        evaluation = self.evaluate(candidate)
        if not evaluation.tokens:
            return None
        self.accept_or_drop(candidate, evaluation)
        return evaluation

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that training goes on with after a resume, for safetensors and for JSON. The published drafter is saved
        by whoever saves the policy, and the answers in the buffer are not: the next step brings new ones."""
        tensors, values = self._optimizer.state()
        version, numbers, gauss = self._rng.getstate()
        return tensors, {
            "trainer": values,
            "version": self.version,
            "tokens": self.tokens,
            "size": self.step_size.tokens,
            "age": self._steps_made,
            "dice": [version, list(numbers), gauss],
            "seen": self.buffer.seen,
        }

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self._optimizer.load(tensors, values["trainer"])
        self.version = values["version"]
        self.tokens = values["tokens"]
        self.step_size.tokens = values["size"]
        self._steps_made = values["age"]
        version, numbers, gauss = values["dice"]
        self._rng.setstate((version, tuple(numbers), gauss))
        self.buffer.seen = values["seen"]

    def _is_held_out(self, sample: FeatureSample) -> bool:
        return sample.held_out
