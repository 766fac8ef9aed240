"""A worker: the policy, engines that decode, a part of the learner, and the drafter, which it trains when it has
nothing to decode. One class, over whichever transport: its public methods are the calls that the driver makes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.cluster.coordinator import WroteAhead
from paceline.cluster.membership import Membership
from paceline.cluster.messages import Ready, RolloutMode, RolloutOutcome, WorkerSpec
from paceline.cluster.reporter import Reporter
from paceline.cluster.worker_ahead import WorkerAhead
from paceline.cluster.worker_drafter import WorkerDrafter
from paceline.cluster.worker_learning import WorkerLearning
from paceline.cluster.worker_rollout import WorkerRollout
from paceline.draft.eagle.files import DRAFTER
from paceline.lora.files import ADAPTER, save_adapter
from paceline.lora.start import begin_lora
from paceline.model.decoder import Decoder
from paceline.rollout.differences import Difference, explain
from paceline.rollout.engine import RolloutEngine
from paceline.setup.build import make_drafter
from paceline.setup.engines import load_policy_model, save_policy_model

if TYPE_CHECKING:
    from paceline.cluster.coordinator import Report
    from paceline.cluster.rendezvous import Rendezvous
    from paceline.config import Config
    from paceline.core import Completion, Observation, Request, Trajectory, TrajectoryFacts
    from paceline.learn.shards import Holders
    from paceline.learn.update_batch import Score
    from paceline.spot.evaluation import Evaluation
    from paceline.spot.trainer import TrainingStats


class Worker:
    def __init__(self, config: Config, spec: WorkerSpec, tell: Callable[[Report], None]):
        self.spec = spec
        self.reporter = Reporter(spec, tell)
        if spec.threads:
            torch.set_num_threads(spec.threads)
        device = torch.device(spec.device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        adapters = config.learn.lora.rank and spec.learns
        self.model = load_policy_model(config, spec.base if adapters else spec.source, device)
        lora = begin_lora(self.model, config, spec.state) if adapters and isinstance(self.model, Decoder) else None
        learned = lora.parameters if lora else dict(self.model.named_parameters())
        self.membership = Membership(spec.number, spec.workers, learned if spec.learns else {}, self.reporter)
        self.learning = WorkerLearning(config, self.model, lora, self.membership, self.reporter, spec.state)
        trained = spec.state / DRAFTER if spec.state and (spec.state / DRAFTER).is_dir() else None
        drafter = make_drafter(self.model, config, trained)
        self.rollout = WorkerRollout(config, spec, self.model, drafter, self.reporter)
        self.drafter = WorkerDrafter(config, spec, drafter, self.model.device)
        if self.drafter.learning:
            self.learning.learner.on_hidden = self.drafter.learning.on_hidden
            self.learning.learner.wants_hidden = self.drafter.learning.wants_hidden
        self.ahead = WorkerAhead()
        self.training = False
        """Whether it trains the drafter at present."""
        self._failed = False

    def ready(self) -> Ready:
        longest = self.rollout.engine.max_length
        has_drafter = self.drafter.model is not None
        return Ready(self.spec.number, self.spec.generation, max_length=longest, has_drafter=has_drafter)

    # Between calls

    @property
    def busy(self) -> bool:
        """Whether there is something to do without a call."""
        return not self._failed and (bool(self.rollout.runnable) or self.training or self.ahead.active)

    @property
    def doing(self) -> str:
        """What `run_once` does next, in words."""
        if self.ahead.active:
            return "writing ahead"
        return "decoding" if self.rollout.runnable else "training the drafter"

    def run_once(self) -> None:
        """Do a little of what there is to do: a round of decoding, or a step of training."""
        if self.ahead.active:
            if not self.ahead.step():
                self.stop()
                self.reporter.tell(WroteAhead(self.spec.number, self.spec.generation))
            self.reporter.still_alive()
        elif self.rollout.runnable:
            self._finished(self.rollout.step())
        elif self.training:
            if not self.drafter.step():
                self.stop()
            self.reporter.still_alive()

    def abandon(self) -> None:
        """Something raised: do nothing any more without a call, and leave the process group, so that those who wait
        for this worker hear of it at once."""
        self._failed = True
        self.training = False
        self.membership.peers.close()

    # Rollout

    def begin(self, step: int, mode: RolloutMode, train: bool = False) -> None:
        """A rollout begins. With `train`, a worker alone on its GPU trains the drafter in the tail."""
        self.training = False
        self.ahead.forget()
        first = self.rollout.begin(step, mode)
        self.drafter.begin_rollout(first, self.rollout.learned_from, train)

    def assign(self, requests: Sequence[Request], written: Mapping[int, array[int]]) -> None:
        self.training = False
        self.ahead.stop()
        self.rollout.assign(requests, written)

    def observe(self, observations: Sequence[Observation]) -> None:
        """What turns of its requests have led to."""
        self._finished(self.rollout.observe(observations))

    def _finished(self, done: Sequence[Completion]) -> None:
        """After a round, or what ended without one."""
        engine = self.rollout.engine
        self.drafter.after_round(done if self.rollout.learned_from else (), engine.unfinished, engine.waiting)
        self.rollout.report(done)

    def release(self, count: int) -> None:
        self.rollout.release(count)

    def train(self) -> None:
        self.ahead.stop()
        self.training = self.drafter.learning is not None
        self.rollout.log.begin("training" if self.training else "idle")

    def write_ahead(self, requests: Sequence[Request], written: Mapping[int, array[int]]) -> None:
        """Begin these of the next step; `written` is what there is of some."""
        self.training = False
        self.ahead.stop()
        self.ahead.begin(self._own_engine(), requests, written)
        self.rollout.log.begin("ahead")

    def _own_engine(self) -> RolloutEngine:
        assert isinstance(self.rollout.engine, RolloutEngine), "others do not write ahead: the settings refuse it"
        return self.rollout.engine

    def stop(self) -> None:
        """No more training, and no more writing ahead."""
        self.training = False
        self.ahead.stop()
        self.rollout.log.begin("idle")

    def end(self) -> RolloutOutcome:
        """The rollout is over."""
        self.ahead.stop()
        return self.rollout.end(self.drafter.end_rollout(), self.ahead.written)

    def clear(self) -> None:
        """Drop every request: the rollout will not be finished."""
        self.training = False
        self.ahead.forget()
        self.drafter.clear()
        self.rollout.engine.clear()

    def explain(self, pairs: list[tuple[Completion, Completion]]) -> list[Difference]:
        assert isinstance(self.model, Decoder), "only our engine writes what can be compared token by token"
        return explain(self.model, pairs)

    # Learning

    def begin_update(self, facts: list[TrajectoryFacts]) -> None:
        self.learning.begin_update(facts)

    def score(self, share: list[int], trajectories: dict[int, Trajectory]) -> list[Score]:
        return self.learning.score(share, trajectories)

    def prepare_update(self, step: int, scores: dict[int, Score]) -> tuple[int, list[list[int]], list[int]]:
        return self.learning.prepare_update(step, scores)

    def gradients(
        self, update: int, share: list[int], trajectories: Mapping[int, Trajectory], scores: Mapping[int, Score]
    ) -> None:
        self.learning.gradients(update, share, trajectories, scores, self.drafter)

    def apply(self, update: int, number: int) -> dict[str, float]:
        metrics = self.learning.apply(update, number)
        self.rollout.adaptive.refresh()
        return metrics

    # The drafter

    def train_drafter(self, seconds: float) -> TrainingStats:
        return self.drafter.train(seconds)

    def merge_drafters(self) -> Evaluation | None:
        return self.drafter.merge(self.membership.peers)

    def accept_drafter(self, evaluation: Evaluation) -> None:
        if self.drafter.accept(evaluation, write=self.membership.leads):
            self.rollout.adaptive.drafter_accepted()

    # Coming, going, keeping

    def close(self) -> None:
        self.rollout.close()

    def join(self, rendezvous: Rendezvous, newcomers: tuple[int, ...], before: list[Holders]) -> None:
        """Form a process group with others. Newcomers get all that the others have. Can be repeated."""
        self.membership.join(rendezvous)
        if newcomers:
            veteran = next(w for w in rendezvous.workers if w not in newcomers)
            self.membership.peers.broadcast(self._weights(), veteran)
            self.learning.learner.publish()
            self._take_counts(veteran)
        self.membership.take_slots(before, self.learning.learner.optimizer)

    def joined(self) -> None:
        """All others have joined too."""
        self.membership.drop_slots(self.learning.learner.optimizer)

    def _weights(self) -> list[Tensor]:
        learner = self.learning.learner
        start = learner.lora.start.values() if learner.lora else ()
        models: list[torch.nn.Module | None] = [learner.reference, self.drafter.model]
        others = [p for model in models if model is not None for p in model.parameters()]
        return [p.data for p in (*learner.parameters.values(), *start, *others)]

    def _take_counts(self, veteran: int) -> None:
        learner = self.learning.learner
        counts = torch.tensor([learner.updates, learner.optimizer.steps, self.drafter.version])
        self.membership.peers.broadcast([counts], veteran)
        learner.updates, learner.optimizer.steps, version = counts.tolist()
        self.rollout.adaptive.refresh()
        self.drafter.restart(version)

    def save(self, folder: Path, first: int) -> dict[str, Any]:
        """Write this worker's part of a checkpoint, the policy too if it is the first -> its tuner's state. Can be
        repeated."""
        policy = first == self.spec.number
        self.drafter.save(folder, policy)
        if policy:
            save_policy_model(self.model, folder)
            if self.learning.learner.lora:
                save_adapter(self.learning.learner.lora, folder / ADAPTER, self.spec.base)
        self.learning.save(folder, policy)
        return self.rollout.adaptive.tuner.state()

    def restore_tuner(self, state: dict[str, Any]) -> None:
        self.rollout.adaptive.tuner.restore(state)
