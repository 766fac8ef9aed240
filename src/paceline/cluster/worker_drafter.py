"""A worker's part in the drafter: it trains a copy when it has nothing to decode, and takes part in the merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core import moved
from paceline.draft.eagle.files import DRAFTER, save_drafter
from paceline.errors import UserError
from paceline.spot.evaluation import Evaluation
from paceline.spot.learning import DrafterLearning
from paceline.spot.merge import contribution, merged
from paceline.spot.overlap import OverlappedTraining
from paceline.spot.state import load_training, save_training
from paceline.spot.trainer import TrainingStats
from paceline.spot.when import when_to_train
from paceline.spot.writer import DrafterWriter

if TYPE_CHECKING:
    from paceline.cluster.messages import WorkerSpec
    from paceline.cluster.peers import Peers
    from paceline.config import Config
    from paceline.core import Completion, Trajectory
    from paceline.draft.eagle.model import EagleModel


class WorkerDrafter:
    """Present on every worker; `learning` is None where no drafter is trained."""

    def __init__(self, config: Config, spec: WorkerSpec, model: EagleModel | None, device: torch.device):
        self.model = model
        self.overlap: OverlappedTraining | None = None
        self.writer: DrafterWriter | None = None
        self._candidate: list[Tensor] | None = None
        """What the drafters of all were merged into, until it is accepted or not."""
        self.learning = self._make_learning(config, spec, device)
        if self.learning is None:
            return
        if self.learning.in_tail and spec.workers == 1 and device.type == "cuda":
            self.overlap = OverlappedTraining(self.learning.trainer)
        if spec.state is not None:
            load_training(self.learning.trainer, spec.state / DRAFTER)
        if spec.run:
            self.writer = DrafterWriter(spec.run / DRAFTER)

    def _make_learning(self, config: Config, spec: WorkerSpec, device: torch.device) -> DrafterLearning | None:
        when = when_to_train(config, self.model is not None)
        if when == "off":
            return None
        if when == "tail" and spec.workers == 1 and device.type != "cuda":
            raise UserError(
                "spot.when=tail trains the drafter on workers that have run dry, but there is only one, and no GPU on "
                "which it could train beside decoding: set cluster.workers=2 or more, or spot.when=update"
            )
        if self.model is None:
            raise UserError(
                f"spot.when={when} trains a neural drafter, but there is none: set speculation.drafter=new to "
                "begin with an untrained one, and leave speculation.mode at adaptive"
            )
        warm = config.speculation.drafter != "new"
        spot = config.spot.model_copy(update={"when": when})
        return DrafterLearning(self.model, spot, config.seed + spec.number, spec.workers, warm)

    # In a rollout

    def begin_rollout(self, first: bool, adaptive: bool, train: bool) -> None:
        """`first` of its step. Only the `adaptive` engine's rollouts are learned from. With `train`, a worker alone on
        its GPU trains in the tail, overlapped with decoding."""
        if self.learning and adaptive:
            self.learning.begin_rollout(first)
        if self.overlap:
            self.overlap.start(train and adaptive)

    def after_round(self, done: Sequence[Completion], unfinished: int, waiting: int) -> None:
        """`done` are completions to learn from."""
        if self.overlap:
            self.overlap.after_round(unfinished, waiting)
        elif self.learning:
            for completion in done:
                self.learning.finished(completion.request.prompt, completion.tokens, completion.observed)

    def step(self) -> bool:
        """Train for a little while -> whether there was anything to train on."""
        return self.learning is not None and self.learning.step()

    def end_rollout(self) -> TrainingStats:
        if self.learning is None:
            return TrainingStats()
        if self.overlap:
            self.learning.stats += self.overlap.stop()
        return self.learning.stats

    def clear(self) -> None:
        """The rollout will not be finished."""
        if self.overlap:
            self.overlap.stop()

    # After it

    def begin_update(self, lengths: Sequence[int], share: Mapping[int, Trajectory], first: bool) -> None:
        """The learner is about to run the policy over this share of a step's trajectories, whose completions have these
        lengths; `first` of the step's updates. Can be repeated."""
        if self.learning:
            sequences = {i: ([*t.prompt, *t.tokens], len(t.prompt)) for i, t in share.items()}
            observed = {i: moved(t.observed, len(t.prompt), t.length) for i, t in share.items()}
            self.learning.begin_update(lengths, sequences, first, observed)

    def train(self, seconds: float) -> TrainingStats:
        assert self.learning is not None
        self.learning.train_for(seconds)
        return self.learning.stats

    def merge(self, peers: Peers) -> Evaluation | None:
        """Make the next drafter from those of all that trained, and evaluate it -> None if nobody did. Can be
        repeated."""
        assert self.learning is not None
        trainer = self.learning.trainer
        parts = contribution(trainer)
        if not peers.alone:
            parts = [part.float() for part in parts]  # half the bytes for what is rounded to that in the end
        peers.sum(parts)
        self._candidate = merged(parts)
        if self._candidate is None:
            trainer.adopt(None)  # what is not finite is thrown away
            return None
        sums = torch.tensor(trainer.evaluate(self._candidate).sums(), dtype=torch.float64)
        peers.sum([sums])
        return Evaluation.from_sums(sums.tolist())

    def accept(self, evaluation: Evaluation, write: bool) -> bool:
        """Take the merged drafter, or drop it, as the evaluation says -> whether there was one. With `write`, one that
        is taken is written to the run directory. Can be repeated."""
        assert self.learning is not None
        if self._candidate is None:
            return False
        self.learning.trainer.accept_or_drop(self._candidate, evaluation)
        self._candidate = None
        if evaluation.better and write and self.writer and self.model:
            self.writer.write(self.model)
        return True

    # Checkpoints and newcomers

    def save(self, folder: Path, policy: bool) -> None:
        """With `policy`, this worker writes what is the same on all."""
        if self.writer:
            self.writer.wait()
        if policy and self.learning and self.model:
            save_drafter(self.model, folder / DRAFTER)
            save_training(self.learning.trainer, folder / DRAFTER)

    @property
    def version(self) -> int:
        return self.learning.trainer.version if self.learning else 0

    def restart(self, version: int) -> None:
        """Its weights were replaced by those of this version."""
        if self.learning:
            self.learning.trainer.restart(version)
