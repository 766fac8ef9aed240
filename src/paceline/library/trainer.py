"""Reinforcement learning with data and rewards that are Python objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import DEMO, Config, config_from, demo_recipe
from paceline.errors import UserError
from paceline.library.prompts import model_name
from paceline.loop import train
from paceline.observe.hooks import Callback
from paceline.observe.live import LiveView
from paceline.process.stopping import Stopping
from paceline.run import Run
from paceline.setup.resume import GIVEN
from paceline.tasks.datasets import DataSet
from paceline.tasks.rewards import Reward, as_reward, load_reward
from paceline.tasks.sample import Task
from paceline.tasks.wording import Wording

RewardFunction = str | Callable[..., Any]
Rewards = RewardFunction | Sequence[RewardFunction | tuple[RewardFunction, float]]
Data = str | Path | Task | Iterable[Mapping[str, Any]]
EVAL_GIVEN = "eval"  # what the settings call rows of the evaluation that were given in Python


@dataclass(frozen=True)
class Trained:
    """What a run has left."""

    folder: Path
    metrics: list[dict[str, Any]]
    """Of every step."""

    @property
    def checkpoint(self) -> Path:
        """The newest one: an ordinary Hugging Face folder."""
        newest = Run.open(self.folder).newest_checkpoint()
        assert newest is not None, "a run that has ended has saved"
        return newest

    def report(self, out: str | Path | None = None) -> Path:
        """Write the run's page, into the run or to `out` -> its path."""
        from paceline.report.page import write_report

        return write_report(self.folder, Path(out) if out else None)[0]

    @property
    def rewards(self) -> list[float]:
        """Mean reward of every step."""
        return [row["critic/rewards/mean"] for row in self.metrics]


class Trainer:
    """A run: a model, prompts, rewards, settings."""

    def __init__(
        self,
        model: str | Path | None = None,
        data: Data | None = None,
        reward: Rewards | None = None,
        *,
        steps: int | None = None,
        run_dir: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        recipe: str | None = None,
        progress: bool = False,
        eval_data: Data | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        """`model` is a folder, a hub id, or `embedded`. `data` is rows with a prompt each (a list of dicts, a data set
        of the datasets library, anything that can be iterated over), the name of a task or file as in `task.name`, or
        an object with a name and `sample(index)`. Of both None takes what the recipe says, or else the embedded model
        and Countdown. `reward` is one function or several, each with a weight or without:
        `f(prompts, completions, **columns)` or `compute_score(data_source, solution_str, ground_truth, extra_info)`, or
        the name of one that is built in; None takes the task's own. `settings` are by their dotted names, on top of a
        `recipe` if one is named; as on the command line, there is none unless the embedded model trains on Countdown.
        `progress` shows how it goes, also in a notebook. `eval_data` is what the policy is evaluated on, written as
        `data` is; how often and with how many samples is under `eval` in the settings. Each of `callbacks` is called
        after every step with its `StepInfo`: metrics and groups, `log` for numbers of one's own, `stop` to end the run
        there."""
        values: dict[str, Any] = {}
        if model is not None:
            values["model.path"] = model_name(model, "Trainer")
        if isinstance(data, str | Path):
            values["task.name"] = str(data)
        elif data is not None:
            values["task.name"] = getattr(data, "name", GIVEN) if hasattr(data, "sample") else GIVEN
        if eval_data is not None:
            name = getattr(eval_data, "name", EVAL_GIVEN) if hasattr(eval_data, "sample") else EVAL_GIVEN
            values["eval.task"] = str(eval_data) if isinstance(eval_data, str | Path) else name
        named, here = _rewards(reward)
        if named:
            values["reward.functions"] = [{"function": name, "weight": weight} for name, weight in named]
        if steps is not None:
            values["steps"] = steps
        if run_dir is not None:
            values["run_dir"] = str(run_dir)
        values |= dict(settings or {})
        about = DEMO | {key: values[key] for key in DEMO if key in values}
        recipe = recipe or demo_recipe(about["model.path"], about["task.name"])
        self.config = config_from(values, "Trainer(...)", recipe)
        self._task = None if data is None else _task(data, self.config, sent=not here)
        self._eval_task = _task(eval_data, self.config, not here, EVAL_GIVEN) if eval_data is not None else None
        self._rewards = here
        self._resume: Run | Path | None = None
        self._progress = progress
        self._callbacks = list(callbacks)
        self._stopping = Stopping()

    @classmethod
    def resume(
        cls,
        run_dir: str | Path,
        data: Data | None = None,
        reward: Rewards | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        progress: bool = False,
        eval_data: Data | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Trainer:
        """Go on with a run. What was given in Python when it began has to be given again. `settings` change, as far as
        they may in a run that has begun, from its next step on."""
        trainer = cls.__new__(cls)
        run = Run.open(Path(run_dir), list((settings or {}).items()), "Trainer.resume(...)")
        trainer.config = run.config
        trainer._resume = run
        trainer._progress = progress
        trainer._callbacks = list(callbacks)
        trainer._rewards = _rewards(reward)[1]
        trainer._task = None
        if data is not None:
            trainer._task = _task(data, trainer.config, sent=not trainer._rewards)
        trainer._eval_task = None
        if eval_data is not None:
            trainer._eval_task = _task(eval_data, trainer.config, not trainer._rewards, EVAL_GIVEN)
        trainer._stopping = Stopping()
        return trainer

    def train(self) -> Trained:
        """Run all steps that are left. Raises `paceline.errors.Stopped` if it was asked to stop before that."""
        view = LiveView(self.config, quiet=not self._progress)
        try:
            given = self._task, self._rewards or None, self._stopping, self._eval_task, self._callbacks
            run, rows = train(self.config, self._resume, view, *given)
        finally:
            self._stopping = Stopping()
            if self._resume is not None:
                self._resume = Path(self.config.run_dir or "")
        return Trained(run.folder, rows)

    def stop(self) -> None:
        """Ask `train`, which runs in another thread, to stop as soon as it can be saved."""
        self._stopping.ask()


def _task(data: Data, config: Config, sent: bool, name: str = GIVEN) -> Task | None:
    """None for what the settings name. `sent`: rewards have names, so they may run in processes of their own."""
    if isinstance(data, str | Path):
        return None
    if hasattr(data, "sample"):
        return data  # type: ignore[return-value]
    if not isinstance(data, Iterable):
        raise UserError(f"data is of type {type(data).__name__}; give rows, the name of a task or file, or a task")
    rows: Any = data if hasattr(data, "__getitem__") and hasattr(data, "__len__") else list(data)
    t = config.task
    sent = sent and config.reward.workers > 0
    return DataSet(name, rows, Wording.of(t, t.style), t.shuffle, config.seed, sent)


def _rewards(given: Rewards | None) -> tuple[list[tuple[str, float]], list[Reward]]:
    """Names and weights if all have names, so that they run in processes of their own; else the functions."""
    if given is None:
        return [], []
    several = list(given) if isinstance(given, list | tuple) else [given]
    pairs = [one if isinstance(one, tuple) else (one, 1.0) for one in several]
    if all(isinstance(function, str) for function, _ in pairs):
        return [(str(function), weight) for function, weight in pairs], []
    rewards: list[Reward] = []
    for function, weight in pairs:
        if isinstance(function, str):
            rewards.append(load_reward(function, weight))
        elif callable(function):
            name = getattr(function, "__name__", type(function).__name__)
            taken = sum(r.name.partition("-")[0] == name for r in rewards)  # two lambdas have one name
            rewards.append(as_reward(function, f"{name}-{taken + 1}" if taken else name, weight))
        else:
            raise UserError(f"{function!r} is not a reward: give a function, or the name of one")
    return [], rewards
