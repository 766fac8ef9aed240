"""A step of learning by one learner alone, as a cluster of one worker makes it."""

from __future__ import annotations

from paceline.core import Trajectory
from paceline.learn.learner import Learner
from paceline.learn.token_sums import mean_metrics


def update(learner: Learner, trajectories: list[Trajectory], step: int) -> dict[str, float]:
    scores = learner.score(trajectories, range(len(trajectories)))
    batch = learner.make_batch(trajectories, step, scores)
    metrics = []
    for number, indices in enumerate(batch.updates):
        sums = learner.gradients(batch, number, indices)
        metrics.append(learner.apply(batch, number, sums))
    return mean_metrics(metrics)
