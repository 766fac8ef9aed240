"""One step of learning, by all workers together.

Every worker is sent the facts of all trajectories (lengths, rewards), which weights and advantages depend on. The
tokens of a trajectory go only to the worker whose share it is in, and to another one only if the shares change: because
a worker was lost, or because a later update takes other trajectories together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.learn.algorithms import ALGORITHMS
from paceline.learn.shards import deal

if TYPE_CHECKING:
    from paceline.cluster.groups import WorkerGroup
    from paceline.config import LearnConfig
    from paceline.core import Trajectory
    from paceline.learn.update_batch import Score


class SharedUpdate:
    """Lives for one step's updates. Workers may be lost meanwhile, but none joins before the next rollout: so what a
    member was sent once, it has."""

    def __init__(self, config: LearnConfig, group: WorkerGroup, trajectories: list[Trajectory]):
        self.config = config
        self.group = group
        self.trajectories = trajectories
        self._scores: dict[int, Score] = {}
        self._sent: dict[int, set[int]] = {}
        """Worker -> trajectories whose tokens it has."""
        self._scored: dict[int, set[int]] = {}
        """Worker -> trajectories whose scores it has."""
        self._updates_before = 0
        """Updates of the run before this step."""
        self._updates: list[list[int]] = []
        """Trajectories of each update of this step."""
        self._work: list[int] = []
        """Cost of each trajectory, in tokens that go forward."""

    def prepare(self, step: int) -> int:
        """Have all make the same batch -> how many updates will be made of it."""
        facts = [trajectory.facts for trajectory in self.trajectories]
        self.group.calls.send(self.group.workers, "begin_update", facts)
        if self._scores_needed:
            self._score()
        for_all = self._scores if self._advantages_need_scores else {}
        replies = self.group.all("prepare_update", lambda: (step, for_all))
        self._updates_before, self._updates, self._work = next(iter(replies.values()))
        if for_all:
            self._scored = {w: set(for_all) for w in replies}
        return len(self._updates)

    def gradients(self, update: int) -> None:
        """Have the gradients of an update computed, each worker a share of them, and summed."""

        def calls() -> dict[int, tuple[str, tuple[Any, ...]]]:
            shares = self._shares(self._work, self._updates[update])
            return {w: ("gradients", (update, share, *self._missing(w, share))) for w, share in shares.items()}

        self.group.until_done(calls)

    def apply(self, update: int) -> dict[str, float]:
        """Have all take the step -> its metrics."""
        replies = self.group.all("apply", lambda: (update, self._updates_before + update))
        metrics: dict[str, float] = next(iter(replies.values()))
        return metrics

    @property
    def _scores_needed(self) -> bool:
        """Old log-probabilities, where several updates are made of the same trajectories, or the reference's."""
        return self.config.epochs * self.config.minibatches > 1 or bool(self.config.kl_coef)

    @property
    def _advantages_need_scores(self) -> bool:
        """REINFORCE++ whitens returns over the tokens of all trajectories, and they contain the KL term."""
        return ALGORITHMS[self.config.algorithm].kl_in_reward and bool(self.config.kl_coef)

    def _score(self) -> None:
        lengths = [trajectory.length for trajectory in self.trajectories]
        shares: dict[int, list[int]] = {}

        def calls() -> dict[int, tuple[str, tuple[Any, ...]]]:
            shares.clear()
            shares.update(self._shares(lengths, list(range(len(lengths)))))
            return {w: ("score", (share, self._missing(w, share)[0])) for w, share in shares.items()}

        replies = self.group.until_done(calls)
        for worker, share in shares.items():
            self._scores |= zip(share, replies[worker], strict=True)
            self._scored[worker] = set(share)

    def _shares(self, work: list[int], indices: list[int]) -> dict[int, list[int]]:
        """Which worker computes which of these trajectories, given what each costs."""
        workers = self.group.workers
        shares = deal([work[i] for i in indices], len(workers))
        return {w: [indices[i] for i in share] for w, share in zip(workers, shares, strict=True)}

    def _missing(self, worker: int, share: list[int]) -> tuple[dict[int, Trajectory], dict[int, Score]]:
        """What a worker needs for a share and does not have; it is sent now."""
        sent = self._sent.setdefault(worker, set())
        scored = self._scored.setdefault(worker, set())
        trajectories = {i: self.trajectories[i] for i in share if i not in sent}
        scores = {i: self._scores[i] for i in share if i in self._scores and i not in scored}
        sent.update(trajectories)
        scored.update(scores)
        return trajectories, scores
