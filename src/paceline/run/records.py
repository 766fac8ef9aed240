"""What is recorded of a step: metrics of its completions, rows of samples.jsonl and answers.jsonl, timeline spans."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.config import Config
from paceline.core import Group
from paceline.observe.metrics import short_names
from paceline.observe.rollout_spans import rollout_spans
from paceline.observe.timeline import EVALUATE, LOST, MERGE, REWARD, SAVE, TRAIN, UPDATE, Timeline
from paceline.run.directory import Run

if TYPE_CHECKING:
    from paceline.cluster.cluster import Cluster
    from paceline.cluster.messages import RolloutOutcome

# Parts of a step in which all workers do the same: one span of each worker.
SPANS = {
    "reward": REWARD, "update_actor": UPDATE, "train_drafter": TRAIN, "merge_drafter": MERGE, "testing": EVALUATE,
}  # fmt: skip
MIN_SPAN = 1e-4  # seconds; a shorter one could not be seen


class StepRecorder:
    """Writes what the steps of a run did into its directory."""

    def __init__(self, run: Run, config: Config, cluster: Cluster, last_step: int):
        """`config` is the resolved one."""
        self.run = run
        self.config = config
        self.cluster = cluster
        self.timeline = Timeline(run.folder / "timeline.json", last_step)
        self.step = last_step + 1
        """The step that is being made."""
        self.outcomes: list[RolloutOutcome] = []
        """Of its rollouts so far, on every worker."""
        self._lost_before = len(cluster.lost)

    def begin(self, step: int) -> None:
        self.step = step
        self.outcomes = []
        self._lost_before = len(self.cluster.lost)
        self.cluster.completed_by.clear()

    def on_part(self, part: str, seconds: float) -> None:
        """A part of the step is over (see `Clock`)."""
        if part in SPANS and seconds > MIN_SPAN:
            self._span(SPANS[part], time.time() - seconds, seconds, self.step)

    def on_save(self, started: float, seconds: float, step: int) -> None:
        self._span(SAVE, started, seconds, step)

    def _span(self, name: str, started: float, seconds: float, step: int) -> None:
        for worker in self.cluster.workers:
            self.timeline.span(worker, name, started, seconds, step)

    def on_rollout(self, outcomes: Sequence[RolloutOutcome]) -> None:
        """A rollout is over: what each worker did in it, who was missing, and the coordinator's decisions."""
        self.outcomes += outcomes
        for outcome in outcomes:
            for span in rollout_spans(outcome):
                self.timeline.add(span)
        for worker, since, until in self.cluster.absences:
            self.timeline.span(worker, LOST, since, until - since, self.step)
        self.cluster.absences.clear()
        if self.config.cluster.workers > 1:
            self.run.write_decisions(self.step, self.cluster.decisions)

    def describe_workers(self) -> dict[str, float]:
        """Metrics of the step's workers, if there are several: how many take part, how many were lost, seconds idle,
        in drafter training and writing ahead."""
        if self.config.cluster.workers == 1:
            return {}
        return {
            "cluster/workers": float(len(self.cluster.workers)),
            "cluster/lost": float(len(self.cluster.lost) - self._lost_before),
            "cluster/idle_s": sum(outcome.seconds("idle") for outcome in self.outcomes),
            "cluster/training_s": sum(outcome.seconds("training") for outcome in self.outcomes),
            "cluster/ahead_s": sum(outcome.seconds("ahead") for outcome in self.outcomes),
            "ahead/written_tokens": float(sum(len(t) for o in self.outcomes for t in o.ahead.values())),
        }

    def on_groups(self, groups: list[Group]) -> None:
        """The step is done."""
        self.run.write_samples(sample_rows(groups[: self.config.log.samples], self.step))
        self.run.write_answers(answer_row(groups, self.step, self.cluster.completed_by))


def sample_rows(groups: list[Group], step: int) -> list[dict[str, Any]]:
    """The first completion of each group: enough to see what the policy does."""
    rows = []
    for group in groups:
        first = min(group.completions)
        row: dict[str, Any] = {"step": step, "prompt": group.sample.prompt, "answer": group.texts[first]}
        row |= {"reward": group.rewards[first], "finish": group.completions[first].finish_reason}
        rows.append(row | ({"extra": group.extras[first]} if group.extras.get(first) else {}))
    return rows


def answer_row(groups: list[Group], step: int, completed_by: Mapping[int, int]) -> dict[str, Any]:
    """Length, reward and worker of every completion: what the step's metrics are made of."""
    ids = [(group, i) for group in groups for i in sorted(group.completions)]
    return {
        "step": step,
        "lengths": [len(group.completions[i].tokens) for group, i in ids],
        "rewards": [group.rewards[i] for group, i in ids],
        "workers": [completed_by.get(i, 0) for _, i in ids],
    }


def describe_groups(groups: list[Group]) -> dict[str, float]:
    """Metrics of a step's completions: rewards, lengths, and the mean of each reward function."""
    rewards = np.array([r for g in groups for r in g.rewards.values()])
    completions = [c for g in groups for c in g.completions.values()]
    lengths = np.array([len(c.tokens) for c in completions])
    metrics = {
        "critic/rewards/mean": rewards.mean(),
        "critic/rewards/max": rewards.max(),
        "critic/rewards/min": rewards.min(),
        "critic/rewards/std": rewards.std(),
        "groups/mixed": np.mean([len(set(g.rewards.values())) > 1 for g in groups]),
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/min": lengths.min(),
        "response_length/p50": np.percentile(lengths, 50),
        "response_length/p99": np.percentile(lengths, 99),
        "response_length/clip_ratio": np.mean([c.finish_reason == "length" for c in completions]),
        "prompt_length/mean": np.mean([len(g.prompt) for g in groups]),
    }
    names = sorted({name for g in groups for v in g.values.values() for name in v})
    for name, label in zip(names, short_names(names), strict=True):
        values = [v[name] for g in groups for v in g.values.values() if name in v]
        metrics[f"reward/{label}"] = len(values) / len(rewards) if name == "errors" else np.mean(values)
    return {name: float(value) for name, value in metrics.items()}
