"""From a run directory to everything that a step needs: settings decided, memory planned, workers started."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import choose_workers
from paceline.cluster.make import make_cluster
from paceline.config import Config
from paceline.errors import UserError
from paceline.evaluation.evaluator import Evaluator
from paceline.evaluation.prompts import make_eval_set, make_eval_task
from paceline.evaluation.records import read_records
from paceline.learn.algorithms import resolve
from paceline.lora.start import decide_lora
from paceline.model.config import DecoderConfig
from paceline.model.foreign_config import ForeignConfig
from paceline.model.tokenizer import Tokenizer, load_tokenizer
from paceline.observe.live import LiveView
from paceline.observe.metrics import MetricsLog
from paceline.process import waiting
from paceline.process.stopping import Interrupted, Stopping
from paceline.run import Progress, Run
from paceline.run.records import StepRecorder
from paceline.run.saver import stopped
from paceline.setup.build import make_sampling
from paceline.setup.conversations import make_conversations
from paceline.setup.decide import decide, decide_for_device, kept_settings
from paceline.setup.device import choose_device
from paceline.setup.engines import check_foreign, is_own, read_policy_config
from paceline.setup.memory import MemoryPlan, filled, plan_run
from paceline.setup.objective import objective_line
from paceline.setup.resume import Resumption
from paceline.spot.schedule import DrafterSchedule
from paceline.spot.versions import Versions
from paceline.spot.when import when_to_train
from paceline.tasks import Task, make_task
from paceline.tasks.environments.conversations import Conversations
from paceline.tasks.prompts import PromptStream
from paceline.tasks.reward_pool import RewardPool
from paceline.tasks.rewards import ENVIRONMENT, Reward
from paceline.tasks.tasks import choose_style, reworded


@dataclass
class StartedRun:
    """A run that can make its next step."""

    config: Config
    """Leaves nothing open."""
    plan: MemoryPlan | None
    """None where workers are on other machines."""
    prompts: PromptStream
    rewards: RewardPool
    progress: Progress
    cluster: Cluster
    drafting: DrafterSchedule
    recorder: StepRecorder
    metrics_log: MetricsLog
    evaluator: Evaluator | None
    conversations: Conversations | None = None
    """Where completions have turns."""


def start_run(
    config: Config,
    run: Run,
    view: LiveView,
    stopping: Stopping,
    task: Task | None = None,
    rewards: Sequence[Reward] | None = None,
    engines: int = 1,
    eval_task: Task | None = None,
) -> StartedRun:
    """Lock the run directory, restore the newest checkpoint and start everything; whatever fails, nothing is left
    behind. `task`, `rewards` and `eval_task` replace those of the settings; each worker will make `engines` engines."""
    with ExitStack() as undo:
        undo.callback(run.unlock)
        if warning := run.lock():
            view.note(warning)
        try:
            with stopping.listening(view.note), stopping.at_once():
                started = _start(config, run, view, stopping, task, rewards, engines, eval_task, undo)
        except Interrupted as stop:
            raise stopped(run, stopping, "stopped while the run was being loaded") from stop
        undo.pop_all()
        return started


def _start(
    config: Config,
    run: Run,
    view: LiveView,
    stopping: Stopping,
    task: Task | None,
    rewards: Sequence[Reward] | None,
    engines: int,
    eval_task: Task | None,
    undo: ExitStack,
) -> StartedRun:
    resumption = Resumption.of(run, config, task)
    newest = resumption.newest
    given = run.given(config)
    config = resumption.without_model(run.given(config, kept_settings(newest)))
    view.loading("the tokenizer and the plan for memory")
    config, tokenizer, plan = _resolve(config, newest, view, engines)
    view.loading("the data")
    style: Any = config.task.style
    task = reworded(task, config.task, style) if task else make_task(config.task, config.seed, style)
    if config.eval.task:
        eval_task = eval_task or make_eval_task(config, style)
    pool = make_rewards(resumption.with_rewards(config), task, rewards, run.folder / "rewards.log")
    undo.callback(pool.close)
    eval_pool = pool
    if eval_task and needs_other_rewards(config, task, eval_task, rewards):
        eval_pool = make_rewards(with_eval_rewards(config), eval_task, None, run.folder / "rewards.log")
        undo.callback(eval_pool.close)
    if eval_task:
        read_records(run.folder)  # what is damaged is better found now
    progress = run.restore()
    resumption.check_steps(progress, config.steps)
    talks = make_conversations(resumption.with_rewards(config), tokenizer, style, run.folder, progress.step)
    if talks:
        undo.callback(talks.close)
    prepare = talks.prepare if talks else None
    sampling = make_sampling(config, tokenizer.eos_ids)
    cluster = make_cluster(config, run, view.note)
    undo.callback(cluster.close)
    if config.cluster.backend == "ray":  # which only now is there to be asked
        from paceline.cluster.ray_actors import choose_ray_device

        config = decide_for_device(config, torch.device(choose_ray_device(config)))
    run.write_config(given, config, kept_settings(newest))
    resumption.tell(config, progress, view)
    with stopping.listening():  # again: Ray sets handlers of its own
        view.loading("the model")
        facts = cluster.start()
    if progress.tuner:
        cluster.restore_tuner(progress.tuner)
    prompts = PromptStream(task, tokenizer, sampling, config, facts.max_length, view.say, prepare)
    first = prompts.group(0)  # a prompt that cannot work is better found now
    view.loading("the reward functions")
    pool.ready()
    if config.model.device == "cpu" and (hint := waiting.advice(config.model.threads or 1)):
        view.note(hint)
    view.say(objective_line(config, facts.max_length, len(first.prompt)))
    evaluator = None
    if eval_task:
        eval_set = make_eval_set(eval_task, tokenizer, sampling, config, facts.max_length, prepare)
        shared = eval_pool is pool
        evaluator = Evaluator(config, eval_set, eval_pool, shared, cluster, tokenizer, stopping, view.note, talks)
        eval_pool.ready()
    log = config.log
    return StartedRun(
        config,
        plan,
        prompts,
        pool,
        progress,
        cluster,
        make_schedule(config, facts.has_drafter, progress, cluster),
        StepRecorder(run, config, cluster, progress.step),
        MetricsLog(run.folder, log.tensorboard, log.wandb, log.trackio, config.model_dump()),
        evaluator,
        talks,
    )


def _resolve(
    config: Config, newest: Path | None, view: LiveView, engines: int
) -> tuple[Config, Tokenizer, MemoryPlan | None]:
    """Decide what the settings leave open, as far as it does not take workers to know it."""
    config = decide_lora(choose_workers(resolve(config)), resumed=newest is not None)
    source = str(newest) if newest else config.model.path
    tokenizer = load_tokenizer(source, config.task.chat_template_kwargs)
    shape = read_policy_config(config, source)
    if isinstance(shape, ForeignConfig):
        check_foreign(config, shape)
    plan = plan_run(config, shape, engines) if isinstance(shape, DecoderConfig) and is_own(config) else None
    if plan:
        config = filled(config, plan)
        view.say(plan.line())
    style = choose_style(config.task.style, shape.hf, bool(tokenizer.hf.chat_template))
    config = decide(config, shape, style, newest)
    if config.cluster.backend != "ray":
        config = decide_for_device(config, choose_device(config.model.device))
    return config, tokenizer, plan


def with_eval_rewards(config: Config) -> Config:
    """The config of an evaluation's rewards: those under `eval.functions`, or else those of the run."""
    functions = config.eval.functions or config.reward.functions
    return config.model_copy(update={"reward": config.reward.model_copy(update={"functions": functions})})


def needs_other_rewards(config: Config, task: Task, eval_task: Task, given: Sequence[Reward] | None) -> bool:
    """Whether an evaluation has other reward functions than the run."""
    if config.eval.functions:
        return config.eval.functions != config.reward.functions or bool(given)
    return not given and not config.reward.functions and eval_task.reward != task.reward


def make_schedule(config: Config, has_drafter: bool, progress: Progress, cluster: Cluster) -> DrafterSchedule:
    versions = Versions(config.spot, progress.drafter_version, progress.backoff)
    return DrafterSchedule(config, when_to_train(config, has_drafter), versions, cluster, progress.investment)


def make_rewards(config: Config, task: Task, given: Sequence[Reward] | None, log: Path) -> RewardPool:
    """The reward functions that were given, those of the settings, or else the task's own."""
    r = config.reward
    functions: Sequence[Reward] | list[tuple[str, float]] = given or [(f.function, f.weight) for f in r.functions]
    own = None if functions else task.reward
    given_by = [name for name in (own, ENVIRONMENT if config.environment.name else None) if name is not None]
    if not functions and not given_by:
        raise UserError(f"the data set {task.name} brings no reward of its own: name one in reward.functions")
    per = {f.function: f.per for f in r.functions if f.per is not None}
    return RewardPool(
        functions or [(name, 1.0) for name in given_by], r.workers, r.timeout_s, log, r.start_timeout_s, per
    )
