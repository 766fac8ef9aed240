"""Runs with vLLM as the rollout engine: the learner in this process, vLLM in the environment of `make test-vllm`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.config import Config, load_config
from paceline.core import Trajectory
from paceline.loop import TrainLoop
from paceline.observe.live import LiveView
from paceline.process.guard import descendants
from paceline.run import Run

from .test_vllm import PYTHON

DEADLINES = ["cluster.start_timeout_s=900", "cluster.timeout_s=300"]  # of a machine that does other things too
ENGINE = [
    "rollout.engine=vllm",
    f"rollout.vllm_python={PYTHON}",
    "rollout.vllm={enforce_eager: true}",
    *DEADLINES,
]  # fmt: skip  (compiling takes longer than the answers)
COMMON = ["cluster.workers=1", "model.device=cpu", "log.tensorboard=false", "learn.algorithm=grpo"]


@dataclass
class Checked:
    """An update: how far the engine's log-probabilities are from the learner's before it, and what it changes."""

    difference: float
    """Largest, of all tokens."""
    mean: float
    """Of all tokens."""
    moved: float
    """Mean."""


class Watch(LiveView):
    """Hears what is said, and lets something be done once tokens of a step are written."""

    def __init__(self, config: Config):
        super().__init__(config, quiet=True)
        self.said: list[str] = []
        self.on_tokens: Callable[[int], None] = lambda step: None

    def note(self, text: str) -> None:
        self.said.append(text)

    def rollout_progress(self, finished: int, tokens: int) -> None:
        if tokens:
            self.on_tokens(self.step + 1)


def new_run(folder: Path, *words: str, own: bool = False) -> tuple[TrainLoop, Watch]:
    settings = [*COMMON, *([] if own else ENGINE), *words]
    return _loop(Run.create(load_config("default", [f"run_dir={folder}", *settings])))


def resumed(folder: Path, **changes: Any) -> tuple[TrainLoop, Watch]:
    return _loop(Run.open(folder, [(name.replace("__", "."), value) for name, value in changes.items()]))


def _loop(run: Run) -> tuple[TrainLoop, Watch]:
    view = Watch(run.config)
    return TrainLoop(run.config, run, view), view


class WeightCheck:
    """Around each update of a loop: the learner's log-probabilities of what the engine wrote."""

    def __init__(self, loop: TrainLoop):
        self.loop = loop
        self.seen: list[Checked] = []
        self._update = loop.cluster.update
        loop.cluster.update = self  # type: ignore[method-assign,assignment]

    def __call__(self, trajectories: list[Trajectory], step: int) -> dict[str, float]:
        learner = worker_of(self.loop).learning.learner
        before = torch.cat(learner.logprobs(trajectories)).double()
        engine = torch.tensor([x for t in trajectories for x in t.logprobs], dtype=torch.float64)
        metrics: dict[str, float] = self._update(trajectories, step)
        after = torch.cat(learner.logprobs(trajectories)).double()
        off = (before - engine).abs()
        self.seen.append(Checked(float(off.max()), float(off.mean()), float((after - before).abs().mean())))
        return metrics


def worker_of(loop: TrainLoop) -> Any:
    return loop.cluster.transport.worker  # type: ignore[attr-defined]


def signal_engine(loop: TrainLoop, number: signal.Signals) -> None:
    """To the process that vLLM runs in, which is below its guardian."""
    os.kill(descendants(worker_of(loop).rollout.adaptive.pid)[0], number)
