"""The RL step, whole: prompts -> completions -> rewards -> advantages -> update. Start reading here.

    prompts ──► workers: rollout ──completions──► rewards (while decoding goes on, as each one finishes)
       ▲           │ idle workers train              │
       │           ▼                                 ▼
     task       drafter v+1      policy v+1 ◄── update ◄── trajectories

Nothing here keeps random state. A prompt is a function of (seed, index in the stream), a token of (policy, request,
position), so a run that was killed goes on as if nothing had happened.

How all of this is loaded and started is in `setup/start.py`; what is recorded of a step, and how a run is saved when it
stops, in `run/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.cluster.lengths import Lengths
from paceline.cluster.messages import RolloutMode
from paceline.config import Config
from paceline.core import Completion, Group, Request
from paceline.evaluation.after_step import AfterStep
from paceline.learn.advantages import mixed
from paceline.observe.clock import Clock
from paceline.observe.hooks import Callback
from paceline.observe.live import LiveView
from paceline.observe.metrics import read_lines
from paceline.process.stopping import Stopping
from paceline.rollout.stats import EngineStats
from paceline.run import Run
from paceline.run.records import describe_groups
from paceline.run.saver import RunSaver, starting
from paceline.setup.start import start_run
from paceline.spot.trainer import TrainingStats
from paceline.tasks import Task
from paceline.tasks.finished import FinishedAnswers
from paceline.tasks.reward_pool import RewardPool
from paceline.tasks.reward_process import RewardResult
from paceline.tasks.rewards import Reward


class TrainLoop:
    engines = 1
    """Engines that each worker will make."""

    def __init__(
        self,
        config: Config,
        run: Run,
        view: LiveView | None = None,
        task: Task | None = None,
        rewards: Sequence[Reward] | None = None,
        stopping: Stopping | None = None,
        eval_task: Task | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        """`task`, `rewards` and `eval_task` replace what the settings name. The directory is locked until `close`."""
        self.run = run
        self.view = view or LiveView(config, quiet=True)
        self.stopping = stopping or Stopping()
        self.stopping.resume_command = run.resume_command
        started = start_run(config, run, self.view, self.stopping, task, rewards, self.engines, eval_task)
        self.config = started.config
        self.plan = started.plan
        self.prompts = started.prompts
        self.finished = FinishedAnswers(self.prompts.tokenizer, started.rewards, started.conversations)
        self.progress = started.progress
        self.cluster = started.cluster
        self.drafting = started.drafting
        self.recorder = started.recorder
        self.lengths = Lengths(self.config.rollout.max_tokens / 2)
        self.saver = RunSaver(run, self.cluster, self.prompts.tokenizer, self.progress, self.recorder, self.view)
        self.after_step = AfterStep(started, run, self.view, self.saver, callbacks)

    @property
    def rewards(self) -> RewardPool:
        return self.finished.rewards

    def stop(self) -> None:
        """Ask the run to stop as Ctrl-C would, from any thread: it is saved, and `train` raises `Stopped`."""
        self.stopping.ask()

    def close(self) -> None:
        try:
            self.after_step.close()
            self.finished.close()
        finally:
            self.cluster.close()
            self.run.unlock()

    def train(self) -> list[dict[str, float]]:
        """Run all remaining steps; returns the metrics of the whole run, step by step."""
        try:
            with self.stopping.listening(self.view.note):
                self._train()
        finally:
            self.close()
        return read_lines(self.run.folder / "metrics.jsonl")

    def _train(self) -> None:
        try:
            with self.saver.save_on_stop(self.stopping):
                self.view.start(self.progress.step)
                self.after_step.begin(self.progress.step)
                while self.progress.step < self.config.steps and not self.after_step.ends_run:
                    self.stopping.check()
                    metrics = self.step()
                    self.after_step.write(self.progress.step, metrics)
                self.saver.save_once()
                self.saver.stop_if_one_failed()
                self.recorder.timeline.close()
        finally:
            self.view.stop()

    def step(self) -> dict[str, float]:
        """One RL step."""
        self.recorder.begin(self.progress.step + 1)
        clock = Clock(self.recorder.on_part, self.view.part)

        groups, cursor = self._collect(clock)
        training = sum((o.training for o in self.recorder.outcomes), TrainingStats())
        stats = sum((o.stats for o in self.recorder.outcomes), EngineStats())
        with clock.part("update_actor"):
            trajectories = [one for group in groups for one in group.trajectories()]
            metrics = self.cluster.update(trajectories, self.progress.step)
        self.saver.check_update(metrics, self.config.learn.max_bad_updates)

        tokens = sum(one.num_tokens for one in trajectories)
        metrics |= (
            self.finished.metrics() | describe_groups(groups) | stats.metrics() | self.recorder.describe_workers()
        )
        self._count_step(groups, cursor, metrics | clock.metrics(tokens))

        rounds = [o.rounds for o in self.recorder.outcomes]
        rate = stats.first_accept_rate
        metrics |= self.drafting.after_update(self.progress.step, clock, training, rate, rounds, self.stopping.asked)
        self.drafting.write_to(self.progress)

        metrics |= self.recorder.describe_workers() | self.after_step.evaluate(self.progress.step, clock)
        self.progress.metrics = metrics | clock.metrics(tokens)
        every = self.config.checkpoint.every
        with clock.part("save_checkpoint"):
            if (every and self.progress.step % every == 0) or self.after_step.saves:
                self.saver.save()
        self.saver.stop_if_one_failed()
        return metrics | clock.metrics(tokens)

    def _count_step(self, groups: list[Group], cursor: int, metrics: dict[str, float]) -> None:
        """The policy is updated, so the step is done: whatever fails from here on does not undo it."""
        self.progress.step += 1
        self.progress.cursor = cursor
        self.progress.metrics = metrics
        self.recorder.on_groups(groups)
        self.after_step.learned_from(groups)

    def _collect(self, clock: Clock) -> tuple[list[Group], int]:
        """Roll out the step's prompts; with dynamic sampling, replace groups of equal rewards, a few times."""
        wanted = self.config.rollout.prompts
        learn = self.config.learn
        cursor = self.progress.cursor
        kept: list[Group] = []
        groups: list[Group] = []
        for _ in range(learn.dynamic_sampling_rounds if learn.dynamic_sampling else 1):
            count = wanted - len(kept)
            groups = self._rollout(range(cursor, cursor + count), clock)
            cursor += count
            if not learn.dynamic_sampling:
                return groups, cursor
            kept += [g for g in groups if bool(mixed(torch.tensor(list(g.rewards.values()))))]
            if len(kept) == wanted:
                break
        return kept or groups, cursor

    def _rollout(self, indices: range, clock: Clock) -> list[Group]:
        """Completions of the prompts at these indices, each rewarded while others are still decoding."""
        groups = {i: self.prompts.group(i) for i in indices}
        requests = [request for i, group in groups.items() for request in self.prompts.requests(i, group)]
        expected = {r.id: self.lengths.expect(r.prompt) for r in requests}
        self.finished.begin(self.progress.step + 1, lambda i: groups[self.prompts.index_of(i)].sample)
        with clock.part("gen"):
            self.view.rollout_started(self.progress.step, len(requests))
            for completions in self._answers(requests, expected):
                for completion in completions:
                    group = groups[self.prompts.index_of(completion.request.id)]
                    self.finished.finish(completion, group, self.config.rollout.samples)
                self._take(self.rewards.collect(), groups)
                self.view.rollout_progress(sum(len(g.completions) for g in groups.values()), self.cluster.tokens)
                # Between two tokens is as good a moment as any: a step that is dropped is made again, the same.
                self.stopping.check()
        with clock.part("reward"):  # of the last completions; the others were rewarded meanwhile
            while self.rewards.open:
                with self.stopping.at_once():
                    results = self.rewards.collect(block=True)
                self._take(results, groups)
        for sentence in self.rewards.errors.told(self.config.reward.error_value):
            self.view.note(sentence)
        for group in groups.values():
            self.lengths.learn(group.prompt, [len(c.tokens) for c in group.completions.values()])
        with clock.part("end_rollout"):  # whoever trains the drafter is in the middle of a step
            self._end_rollout()
        return list(groups.values())

    def _answers(self, requests: list[Request], expected: dict[int, float]) -> Iterator[list[Completion]]:
        train = self.drafting.in_tail(self.progress.step)
        coming = lambda: self._coming(self.prompts.index_of(requests[-1].id) + 1)  # noqa: E731
        turns = self.finished.conversations
        return self.cluster.rollout(
            self.progress.step + 1, requests, expected, RolloutMode(), train, None, coming, turns
        )

    def _coming(self, first: int) -> list[tuple[Request, float]]:
        """The next step's requests with expected lengths; what is wrong with a prompt is said when its turn comes."""
        if self.progress.step + 1 >= self.config.steps:
            return []
        indices = range(first, first + self.config.rollout.prompts)
        return [(r, self.lengths.expect(r.prompt)) for i in indices for r in self.prompts.peek(i)]

    def _end_rollout(self) -> None:
        self.recorder.on_rollout(list(self.cluster.end().values()))

    def _take(self, results: list[RewardResult], groups: dict[int, Group]) -> None:
        def stop(error: str) -> Exception:
            return self.saver.fix_and_resume(error, ", or count such answers with reward.on_error=value")

        for result in results:
            group = groups[self.prompts.index_of(result.request_id)]
            self.finished.take(result, group, self.config.reward, self.prompts.task.name, stop)


def train(
    config: Config,
    resume: Path | Run | None = None,
    view: LiveView | None = None,
    task: Task | None = None,
    rewards: Sequence[Reward] | None = None,
    stopping: Stopping | None = None,
    eval_task: Task | None = None,
    callbacks: Sequence[Callback] = (),
) -> tuple[Run, list[dict[str, Any]]]:
    """The main job: a new run from `config`, or the rest of `resume`. Off the main thread `stopping` can end it."""
    stopping = stopping or Stopping()
    view = view or LiveView(config, quiet=True)
    with stopping.listening(), view:
        run = Run.open(resume) if isinstance(resume, Path) else resume or Run.create(config)
        view.folder = run.folder
        with starting(run, is_new=not resume):
            loop = TrainLoop(run.config, run, view, task, rewards, stopping, eval_task, callbacks)
        return run, loop.train()
