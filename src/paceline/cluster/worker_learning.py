"""A worker's part in updates of the policy: the gradients of its share of the trajectories, summed over all workers.

Of every trajectory a worker knows the facts that weights and advantages depend on (lengths, reward); it is sent the
tokens of those in its share, and of others only when a worker was lost and the shares are dealt anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core import Trajectory, TrajectoryFacts
from paceline.learn.learner import Learner
from paceline.learn.state import load_learner, save_learner
from paceline.learn.token_sums import TokenSums
from paceline.learn.update_batch import Score, UpdateBatch

if TYPE_CHECKING:
    from paceline.cluster.membership import Membership
    from paceline.cluster.reporter import Reporter
    from paceline.cluster.worker_drafter import WorkerDrafter
    from paceline.config import Config
    from paceline.learn.logprobs import Policy
    from paceline.lora.adapters import Lora


class WorkerLearning:
    def __init__(
        self,
        config: Config,
        model: Policy,
        lora: Lora | None,
        membership: Membership,
        reporter: Reporter,
        state: Path | None,
    ):
        """`state` is a checkpoint to begin with."""
        self.model = model
        self.membership = membership
        self.learner = Learner(model, config, membership.held(), lora)
        self.learner.on_batch = reporter.still_alive
        if state is not None:
            load_learner(self.learner, state)
        self._trajectories: list[Trajectory | TrajectoryFacts] = []
        self._scores: list[Score] = []
        self._batch: UpdateBatch | None = None
        self._sums = TokenSums()
        self._metrics: dict[str, float] = {}

    def begin_update(self, facts: Sequence[TrajectoryFacts]) -> None:
        """All that every worker has to know of the trajectories of a step."""
        self._trajectories = list(facts)
        self._scores = [Score(None, None)] * len(facts)
        self._batch = None

    def _receive(self, trajectories: Mapping[int, Trajectory], scores: Mapping[int, Score]) -> None:
        """Those that this worker needs and did not have. The batch, once it is made, has the same lists."""
        for i, trajectory in trajectories.items():
            self._trajectories[i] = trajectory
        for i, score in scores.items():
            self._scores[i] = score

    def score(self, share: Sequence[int], trajectories: Mapping[int, Trajectory]) -> list[Score]:
        """What has to be known of a share before the policy changes. Can be repeated."""
        self._receive(trajectories, {})
        scores = self.learner.score(self._trajectories, share)
        scores = [Score(*(t if t is None else t.cpu() for t in score)) for score in scores]
        self._receive({}, dict(zip(share, scores, strict=True)))
        return scores

    def prepare_update(self, step: int, scores: Mapping[int, Score]) -> tuple[int, list[list[int]], list[int]]:
        """Make the batch of a step; `scores` are those on which all advantages depend -> updates made so far,
        trajectories of each of the coming ones, and the cost of each trajectory in tokens. Can be repeated."""
        self._receive({}, scores)
        self._batch = self.learner.make_batch(self._trajectories, step, self._scores)
        return self.learner.updates, self._batch.updates, self._batch.work(self.learner.on_hidden is not None)

    def gradients(
        self,
        update: int,
        share: Sequence[int],
        trajectories: Mapping[int, Trajectory],
        scores: Mapping[int, Score],
        drafter: WorkerDrafter,
    ) -> None:
        """Leave the gradients of a whole update in the parameters of every worker. Can be repeated."""
        self._receive(trajectories, scores)
        batch = self._batch
        assert batch is not None, "prepare_update comes first"
        if update < batch.first_epoch:
            mine = {i: t for i in share if isinstance(t := self._trajectories[i], Trajectory)}
            drafter.begin_update(batch.num_tokens, mine, first=update == 0)
        self._sums = self.learner.gradients(batch, update, share)
        peers = self.membership.peers
        if not peers.alone:
            sums = self._sums.to_tensor(self.model.device)
            peers.sum([sums, *(p.grad for p in self.learner.parameters.values() if p.grad is not None)])
            self._sums = TokenSums.from_tensor(sums)

    def apply(self, update: int, number: int) -> dict[str, float]:
        """Make update `number` of the run, and have the same weights everywhere. Can be repeated."""
        assert self._batch is not None
        if self.learner.updates == number:
            self._metrics = self.learner.apply(self._batch, update, self._sums)
        self.membership.share_weights(self.learner.parameters)
        self.learner.publish()
        return self._metrics

    def save(self, folder: Path, policy: bool) -> None:
        """This worker's part of a checkpoint; with `policy`, also what is the same on all."""
        names = self.membership.saved()
        save_learner(self.learner, folder, self.membership.number, names, reference=policy)
