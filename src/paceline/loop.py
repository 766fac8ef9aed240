"""The RL step, whole: prompts -> answers -> rewards -> advantages -> update. Start reading here.

    prompts ──► workers: rollout ──completions──► judge (beside decoding, as each one finishes)
       ▲           │ whoever runs dry trains         │
       │           ▼                                 ▼
     task       drafter v+1      policy v+1 ◄── update ◄── rewards

Nothing here keeps random state. A prompt is a function of (seed, place in the stream), a token of (policy, request,
position), so a run that was killed goes on as if nothing had happened.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.cluster.lengths import Lengths
from paceline.cluster.make import choose_workers, make_cluster
from paceline.cluster.messages import RolloutMode
from paceline.cluster.worker import RolloutOutcome
from paceline.config import Config
from paceline.core import Completion, Group, Request, Sample
from paceline.errors import RunError, Stopped, UserError, WorkerFailed
from paceline.learn.advantages import mixed
from paceline.learn.algorithms import resolve
from paceline.model.checkpoint import find_model, read_config
from paceline.model.tokenizer import load_tokenizer
from paceline.observe.clock import Clock
from paceline.observe.live import LiveView
from paceline.observe.metrics import MetricsLog, read_lines
from paceline.observe.timeline import IDLE, LOST, MERGE, REWARD, SAVE, TRAIN, UPDATE, Timeline
from paceline.process.stopping import Interrupted, Stopping
from paceline.rollout.stats import EngineStats
from paceline.run import Run
from paceline.setup.build import choose_device, make_sampling
from paceline.setup.decide import decide, decide_for_device, kept
from paceline.setup.memory import filled, plan_run
from paceline.spot.learning import when_to_train
from paceline.spot.trainer import TrainingStats
from paceline.spot.versions import Versions
from paceline.tasks import Task, make_task
from paceline.tasks.reward_pool import RewardPool, RewardResult
from paceline.tasks.rewards import Reward, total
from paceline.tasks.tasks import choose_style

# Parts of a step that are one span each.
SPANS = {"reward": REWARD, "update_actor": UPDATE, "train_drafter": TRAIN, "merge_drafter": MERGE}
SHORT = 1e-4  # seconds: what took less is not worth a span


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
    ):
        """`task` and `rewards` take the place of those that the settings name. The run directory is locked until
        `close`."""
        self.run, self.view = run, view or LiveView(config, quiet=True)
        self.stopping = stopping or Stopping()
        self.stopping.go_on = self._go_on()
        try:
            if warning := run.lock():
                self.view.note(warning)
            with self.stopping.listening(self.view.note), self.stopping.at_once():
                self._load(config, task, rewards)
        except Interrupted as stop:
            run.unlock()
            raise self._stopped("stopped while the run was being loaded") from stop
        except BaseException:
            run.unlock()
            raise

    def _load(self, config: Config, task: Task | None, rewards: Sequence[Reward] | None) -> None:
        run, newest = self.run, self.run.newest_checkpoint()
        given = run.given(config)
        config = choose_workers(resolve(run.given(config, kept(newest))))
        source = str(newest) if newest else config.model.path
        self.tokenizer = load_tokenizer(source)
        shape = read_config(find_model(source))
        self.plan = plan_run(config, shape, self.engines)
        if self.plan:
            config = filled(config, self.plan)
            self.view.say(self.plan.line())
        style = choose_style(config.task.style, shape.hf, bool(self.tokenizer.hf.chat_template))
        config = decide(config, shape, style, newest)
        if config.cluster.backend == "local":
            config = decide_for_device(config, choose_device(config.model.device))
        self.config = config
        self.task = task or make_task(config.task, config.seed, style)
        functions = rewards or reward_functions(config, self.task)
        r = config.reward
        self.judge = RewardPool(functions, r.workers, r.timeout_s, run.folder / "rewards.log", r.start_timeout_s)
        try:
            self.progress = run.restore()
            self.sampling = make_sampling(config, self.tokenizer.eos_ids)
            self.cluster = make_cluster(config, run, self.view.note)
        except BaseException:
            self.judge.close()
            raise
        try:
            if config.cluster.backend == "ray":  # which only now is there to be asked
                from paceline.cluster.ray_actors import choose_ray_device

                self.config = decide_for_device(config, torch.device(choose_ray_device(config)))
            run.write_config(given, self.config, kept(newest))
            with self.stopping.listening():  # again: Ray sets handlers of its own
                facts = self.cluster.start()
            self.max_length, self.has_drafter = facts.max_length, facts.has_drafter
            if self.progress.tuner:
                self.cluster.restore_tuner(self.progress.tuner)
            self.versions = Versions(config.spot, self.progress.drafter_version, self.progress.backoff)
            self.lengths = Lengths(config.rollout.max_tokens / 2)
            self.timeline = Timeline(run.folder / "timeline.json", self.progress.step)
            self._present = self.progress.step + 1
            """The step that is being made."""
            self.outcomes: list[RolloutOutcome] = []
            """Of the rollouts of the present step, on every worker."""
            self._encode(self.task.sample(0))  # a prompt that cannot work is better found now
            self.judge.ready()
        except BaseException:
            self.close()
            raise

    @property
    def spot(self) -> str:
        """When the drafter is trained."""
        return when_to_train(self.config, self.has_drafter)

    def stop(self) -> None:
        """Ask the run to stop as Ctrl-C would, from any thread: it is saved, and `train` raises `Stopped`."""
        self.stopping.ask()

    def close(self) -> None:
        try:
            self.judge.close()
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
        log = self.config.log
        metrics_log = MetricsLog(self.run.folder, log.tensorboard, log.wandb, log.trackio, self.config.model_dump())
        try:
            self.view.start(self.progress.step)
            while self.progress.step < self.config.steps:
                self.stopping.check()
                metrics = self.step()
                metrics_log.write(self.progress.step, metrics)
                self.view.step_done(self.progress.step, metrics)
            self._save_once()
            self.timeline.close()
        except Interrupted as stop:
            self.cluster.clear()
            self._save_once()
            raise self._stopped(f"stopped after step {self.progress.step}") from stop
        except OSError as err:
            raise self.run.disk_error(err) from err
        except RunError:
            raise
        except Exception as err:
            raise self._failure(err) from err
        finally:
            self.view.stop()
            metrics_log.close()

    def _failure(self, err: Exception) -> RunError:
        """Something failed in the middle of a run: save what there is -> the sentence to stop with. The traceback, if
        there is one that tells anything, goes to a file."""
        sentence = str(err) if isinstance(err, UserError | WorkerFailed) else f"{type(err).__name__}: {err}"
        where = ""
        if not isinstance(err, UserError):
            trace = err.trace if isinstance(err, WorkerFailed) else traceback.format_exc()
            where = f"; the traceback is in {self.run.write_error(sentence, trace)}"
        return RunError(f"{sentence}; {self._save_if_whole()}{where}; fix it and resume with: {self._go_on()}")

    def _save_if_whole(self) -> str:
        """Save, unless the policy is half updated -> what there is to go on from."""
        if not self.cluster.updating:
            try:
                self.cluster.clear()
                self._save()
            except Exception as err:  # noqa: BLE001 (told here and in the log; what stopped the run comes first)
                self.run.write_error("while saving", traceback.format_exc())
                self.view.note(f"the run could not be saved: {err}")
            else:
                return f"the run is saved after step {self.progress.step}"
        newest = self.run.newest_checkpoint()
        return f"the last checkpoint, {newest}, is intact" if newest else "there is no checkpoint yet"

    def step(self) -> dict[str, float]:
        """One RL step."""
        clock, lost = Clock(self._on_part), len(self.cluster.lost)
        self.outcomes = []
        self._present = self.progress.step + 1
        self.cluster.writers.clear()
        groups, cursor = self._collect(clock)
        spell = sum((o.spell for o in self.outcomes), TrainingStats())
        stats = sum((o.stats for o in self.outcomes), EngineStats())
        with clock.part("update_actor"):
            answers = [answer for group in groups for answer in group.trajectories()]
            metrics = self.cluster.update(answers, self.progress.step)
        self._check_update(metrics)
        metrics |= describe(groups, self.config.rollout.max_tokens) | stats.metrics() | self._describe_workers(lost)
        tokens = sum(len(answer.tokens) for answer in answers)
        self._count_step(groups, cursor, metrics | clock.metrics(tokens))
        due = self.versions.training_is_due(self.progress.step - 1) and not self.stopping.asked
        if self.spot in ("update", "both") and due:
            with clock.part("train_drafter"):
                spell = self.cluster.spend(self.config.spot.share * clock.elapsed)
        if self.spot != "off":
            with clock.part("merge_drafter"):
                metrics |= self.versions.make(self.cluster.merge, spell, stats.first_accept_rate)
            self.progress.drafter_version = self.versions.version
            self.progress.backoff = self.versions.backoff.state()
        metrics |= self._describe_workers(lost)
        self.progress.metrics = metrics | clock.metrics(tokens)
        every = self.config.checkpoint.every
        with clock.part("save_checkpoint"):
            if every and self.progress.step % every == 0:
                self._save()
        return metrics | clock.metrics(tokens)

    def _count_step(self, groups: list[Group], cursor: int, metrics: dict[str, float]) -> None:
        """The policy is updated, so the step is done: whatever fails from here on does not undo it."""
        self.progress.step += 1
        self.progress.cursor = cursor
        self.progress.metrics = metrics
        self._write_samples(groups)
        self._write_answers(groups)

    def _describe_workers(self, lost: int) -> dict[str, float]:
        if self.config.cluster.workers == 1:
            return {}
        idle = sum(s.seconds for o in self.outcomes for s in o.spans if s.name == IDLE)
        trained = sum(s.seconds for o in self.outcomes for s in o.spans if s.name == TRAIN)
        return {
            "cluster/workers": float(len(self.cluster.members)),
            "cluster/lost": float(len(self.cluster.lost) - lost),
            "cluster/idle_s": idle,
            "cluster/training_s": trained,
        }

    def _collect(self, clock: Clock) -> tuple[list[Group], int]:
        """Roll out the step's prompts; with dynamic sampling, replace groups that teach nothing, a few times."""
        wanted, learn = self.config.rollout.prompts, self.config.learn
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
        """Answers to the prompts at these places in the stream, each judged while others are still being written."""
        samples = self.config.rollout.samples
        groups = {i: self._open_group(i) for i in indices}
        requests = [
            Request(i * samples + k, group.prompt, self.sampling, self.config.seed)
            for i, group in groups.items()
            for k in range(samples)
        ]
        expected = {r.id: self.lengths.expect(r.prompt) for r in requests}
        self.view.rollout_started(self.progress.step, len(requests))
        finished = 0
        with clock.part("gen"):
            for completions in self._answers(requests, expected):
                for completion in completions:
                    group = groups[completion.request.id // samples]
                    group.completions[completion.request.id] = completion
                    text = self.tokenizer.decode(completion.tokens)
                    self.judge.submit(completion.request.id, group.sample, text, completion.tokens)
                finished += len(completions)
                self._take(self.judge.collect(), groups)
                self.view.rollout_progress(finished, self.cluster.tokens)
                # Between two tokens is as good a place as any: a step that is dropped is made again, the same.
                self.stopping.check()
        with clock.part("reward"):  # what is left of the last answers; the rest was judged meanwhile
            while self.judge.open:
                with self.stopping.at_once():
                    verdicts = self.judge.collect(block=True)
                self._take(verdicts, groups)
        for group in groups.values():
            self.lengths.learn(group.prompt, [len(c.tokens) for c in group.completions.values()])
        with clock.part("end"):  # whoever trains is in the middle of a step
            self._end_rollout()
        return list(groups.values())

    def _answers(self, requests: list[Request], expected: dict[int, float]) -> Iterator[list[Completion]]:
        train = self.spot in ("tail", "both") and self.versions.training_is_due(self.progress.step)
        return self.cluster.rollout(self.progress.step + 1, requests, expected, RolloutMode(), train)

    def _end_rollout(self) -> None:
        outcomes = self.cluster.end().values()
        self.outcomes += outcomes
        for span in (span for outcome in outcomes for span in outcome.spans):
            self.timeline.add(span)
        for worker, since, until in self.cluster.absences:
            self.timeline.span(worker, LOST, since, until - since, self.progress.step + 1)
        self.cluster.absences.clear()
        if self.config.cluster.workers > 1:
            self.run.write_decisions(self.progress.step + 1, self.cluster.decisions)

    def _open_group(self, index: int) -> Group:
        sample = self.task.sample(index)
        return Group(sample, self._encode(sample))

    def _encode(self, sample: Sample) -> tuple[int, ...]:
        tokens = tuple(self.tokenizer.encode_prompt(sample.prompt, sample.where))
        limit = self.config.task.max_prompt_tokens or self.max_length - 1
        if not tokens or len(tokens) > limit:
            raise UserError(
                f"the prompt of {sample.where} of {self.task.name} has {len(tokens)} tokens; "
                f"it must have between 1 and {limit} (task.max_prompt_tokens, and the model's context)"
            )
        return tokens

    def _take(self, verdicts: list[RewardResult], groups: dict[int, Group]) -> None:
        for verdict in verdicts:
            group = groups[verdict.ticket // self.config.rollout.samples]
            if verdict.error:
                self._reward_failed(verdict.error, group.sample)
                group.rewards[verdict.ticket] = self.config.reward.error_value
                group.values[verdict.ticket] = {"errors": 1.0}
            else:
                group.rewards[verdict.ticket] = total(self.judge.functions, verdict.values)
                group.values[verdict.ticket] = verdict.values

    def _reward_failed(self, error: str, sample: Sample) -> None:
        prompt = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
        where = f"on {sample.where} of {self.task.name} ({prompt.strip()[:60]!r})"
        if self.config.reward.on_error == "value":
            self.view.note(f"{error} {where}; counted as {self.config.reward.error_value:g}")
            return
        raise RunError(
            f"{error} {where}; {self._save_if_whole()}; fix it and resume with: "
            f"{self._go_on()}, or count such answers with reward.on_error=value"
        )

    def _check_update(self, metrics: dict[str, float]) -> None:
        if not metrics["actor/skipped"]:
            self.progress.bad_updates = 0
            return
        self.progress.bad_updates += 1
        step, limit = self.progress.step + 1, self.config.learn.max_bad_updates
        self.view.note(f"step {step}: the loss or its gradient was not finite, so the update was skipped")
        if self.progress.bad_updates >= limit:
            self._save()
            raise RunError(
                f"{limit} updates in a row were not finite (learn.max_bad_updates); the policy before them is saved "
                f"after step {self.progress.step}; try a lower learn.lr and go on with: {self._go_on()}"
            )

    def _write_samples(self, groups: list[Group]) -> None:
        """The first answers of the first groups: enough to see what the policy does."""
        rows = []
        for group in groups[: self.config.log.samples]:
            first = min(group.completions)
            text = self.tokenizer.decode(group.completions[first].tokens)
            row = {"step": self.progress.step, "prompt": group.sample.prompt, "answer": text}
            rows.append(row | {"reward": group.rewards[first], "finish": group.completions[first].finish_reason})
        self.run.write_samples(rows)

    def _write_answers(self, groups: list[Group]) -> None:
        """Length, reward and worker of every answer: what the step's metrics are made of."""
        rows = [
            (len(g.completions[i].tokens), g.rewards[i], self.cluster.writers.get(i, 0))
            for g in groups
            for i in sorted(g.completions)
        ]
        lengths, rewards, workers = [list(column) for column in zip(*rows, strict=True)]
        row = {"step": self.progress.step, "lengths": lengths, "rewards": rewards, "workers": workers}
        self.run.write_answers(row)

    def _save_once(self) -> None:
        """Unless this step is saved already."""
        if self.run.newest_checkpoint() != self.run.checkpoints / f"step-{self.progress.step:06d}":
            self._save()

    def _save(self) -> None:
        started, before = time.time(), time.perf_counter()
        self.run.save(self.cluster.save, self.tokenizer, self.progress)
        seconds = time.perf_counter() - before
        for worker in self.cluster.members:
            self.timeline.span(worker, SAVE, started, seconds, self.progress.step)

    def _on_part(self, part: str, seconds: float) -> None:
        if part in SPANS and seconds > SHORT:
            for worker in self.cluster.members:
                self.timeline.span(worker, SPANS[part], time.time() - seconds, seconds, self._present)

    def _go_on(self) -> str:
        return f"paceline train --resume {self.run.folder}"

    def _stopped(self, text: str) -> Stopped:
        assert self.stopping.number is not None, "somebody asked"
        return Stopped(f"{text}; go on with: {self._go_on()}", self.stopping.number)


def describe(groups: list[Group], max_tokens: int) -> dict[str, float]:
    """What the answers of a step were like."""
    rewards = np.array([r for g in groups for r in g.rewards.values()])
    lengths = np.array([len(c.tokens) for g in groups for c in g.completions.values()])
    cut = np.mean([c.finish_reason == "length" for g in groups for c in g.completions.values()])
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
        "response_length/clip_ratio": cut,
        "prompt_length/mean": np.mean([len(g.prompt) for g in groups]),
    }
    names = sorted({name for g in groups for v in g.values.values() for name in v})
    for name in names:
        given = [v[name] for g in groups for v in g.values.values() if name in v]
        metrics[f"reward/{name}"] = len(given) / len(rewards) if name == "errors" else np.mean(given)
    return {name: float(value) for name, value in metrics.items()}


def reward_functions(config: Config, task: Task) -> list[tuple[str, float]]:
    """Names and weights of the rewards: those in the settings, or else the task's own."""
    chosen = [(f.function, f.weight) for f in config.reward.functions]
    if not chosen and task.reward is None:
        raise UserError(f"the data set {task.name} brings no reward of its own: name one in reward.functions")
    return chosen or [(str(task.reward), 1.0)]


def train(
    config: Config,
    resume: Path | None = None,
    view: LiveView | None = None,
    task: Task | None = None,
    rewards: Sequence[Reward] | None = None,
    stopping: Stopping | None = None,
) -> tuple[Run, list[dict[str, Any]]]:
    """The main job: a new run from `config`, or the rest of the run at `resume`. It can be asked to end by signals, and
    where they do not reach it, off the main thread, through `stopping`."""
    stopping = stopping or Stopping()
    with stopping.listening():
        run = Run.open(resume) if resume else Run.create(config)
        try:
            trainer = TrainLoop(run.config, run, view, task, rewards, stopping)
        except UserError:
            if not resume:
                run.discard()  # nothing has happened in it yet
            raise
        except RunError:
            raise
        except Exception as err:
            trace = err.trace if isinstance(err, WorkerFailed) else traceback.format_exc()
            sentence = str(err) if isinstance(err, WorkerFailed) else f"{type(err).__name__}: {err}"
            place = run.write_error(sentence, trace)
            raise RunError(f"the run could not be started: {sentence}; the traceback is in {place}") from err
        return run, trainer.train()
