"""Runs of the same seed, prompts and noise that make each step one after the other, in an order that turns; the workers
of those that wait do nothing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.config import load_config
from paceline.core import Group
from paceline.loop import TrainLoop
from paceline.observe.clock import Clock
from paceline.run import Run


class Recorded(TrainLoop):
    """Keeps the completions of the last step."""

    last: dict[int, list[int]]

    def _collect(self, clock: Clock) -> tuple[list[Group], int]:
        groups, cursor = super()._collect(clock)
        self.last = {i: c.tokens for g in groups for i, c in g.completions.items()}
        return groups, cursor


def make_loop(recipe: str, folder: Path, steps: int, workers: int, words: Sequence[str]) -> Recorded:
    """A run in a folder, which is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    same = [f"steps={steps}", f"cluster.workers={workers}", "checkpoint.every=0", "log.tensorboard=false"]
    run = Run.create(load_config(recipe, [*same, f"run_dir={folder}", *words]))
    return Recorded(run.config, run)


def step_in_turn(loops: Mapping[str, Recorded], number: int) -> dict[str, dict[str, float]]:
    """One step of each -> its metrics; another one is the first each time."""
    arms = list(loops)
    first = number % len(arms)
    found = {arm: loops[arm].step() for arm in [*arms[first:], *arms[:first]]}
    return {arm: found[arm] for arm in arms}


def count_same(a: Recorded, b: Recorded) -> int:
    """Completions of the last step that are the same."""
    return sum(b.last[i] == tokens for i, tokens in a.last.items())
