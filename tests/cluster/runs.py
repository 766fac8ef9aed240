"""Runs of a few small steps with any number of workers, and what they wrote and learned."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.config import load_config
from paceline.core import Group
from paceline.loop import TrainLoop
from paceline.observe.clock import Clock
from paceline.run import Run

from ..digits import DIGITS

SMALL = [
    "rollout.prompts=4", "rollout.samples=2", "rollout.max_tokens=40", "task.difficulty=easy", "model.dtype=float64",
    "learn.lr=1e-4", "log.tensorboard=false", "checkpoint.every=0", "cluster.workers=1", DIGITS,
]  # fmt: skip

Answers = list[dict[int, list[int]]]


class Recorded(TrainLoop):
    """Keeps every answer of every step."""

    answers: Answers

    def _collect(self, clock: Clock) -> tuple[list[Group], int]:
        groups, cursor = super()._collect(clock)
        ids = [i for g in groups for i in g.completions]
        assert len(ids) == len(set(ids)) == self.config.rollout.prompts * self.config.rollout.samples
        self.answers = [*getattr(self, "answers", []), {i: c.tokens for g in groups for i, c in g.completions.items()}]
        return groups, cursor


def make(folder: Path, *words: str) -> Recorded:
    config = load_config(None, [*SMALL, f"run_dir={folder}", *words])
    run = Run.create(config)
    return Recorded(run.config, run)


def policy(trainer: Recorded) -> dict[str, Tensor]:
    trainer.saver.save()
    newest = trainer.run.newest_checkpoint()
    assert newest is not None
    return load_file(newest / "model.safetensors")


def run(folder: Path, steps: int, *words: str) -> tuple[Answers, dict[str, Tensor]]:
    trainer = make(folder, f"steps={steps}", *words)
    try:
        for _ in range(steps):
            trainer.step()
        return trainer.answers, policy(trainer)
    finally:
        trainer.close()


def same_policy(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(bool(torch.isclose(a[name], b[name], rtol=0, atol=1e-8).all()) for name in a)
