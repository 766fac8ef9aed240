"""Settings that are changed when a run is resumed: which may change, why the others may not, and what was changed when.

What may not change is what the checkpoint, or the meaning of the run's place in its prompts and of its request ids,
depends on. Everything else may: it counts from the next step on, and `RUN/changes.jsonl` says since when.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from typing_extensions import TypedDict

from paceline.config import Config, change_settings, flat
from paceline.errors import UserError
from paceline.files import reading
from paceline.observe.metrics import append_line, read_rows

CHANGES = "changes.jsonl"
START = "for that, start a new run whose model.path is a checkpoint of this one"
FIXED = {
    "seed": "its prompts and every token that it samples are functions of the seed",
    "run_dir": "it is in the directory that was named, which can be moved as a whole",
    "model.path": "its policy is in its checkpoints",
    "model.dtype": "its weights and its optimizer's state were saved in this precision",
    "task": "its checkpoint holds a place in the stream of prompts, and other prompts would be there",
    "rollout.samples": "request ids, which are the keys of the sampling noise, count by it",
    "learn.optimizer_dtype": "the optimizer's state in its checkpoints has this precision",
    "learn.lora.rank": "the adapters in its checkpoints have this shape",
    "learn.lora.alpha": "the weights in its checkpoints were merged with this factor",
    "learn.lora.targets": "the adapters in its checkpoints belong to these",
    "learn.lora.path": "its adapters are in its checkpoints",
    "learn.master_weights": "the optimizer's state in its checkpoints was made with the other value",
}
"""A setting, or a section -> why a resumed run keeps it."""
Changes = dict[str, tuple[Any, Any]]
"""Dotted key of a setting, or path of a file -> its value, or its hash, before and after."""


class ChangesRow(TypedDict):
    """A row of changes.jsonl: what is different from the step after `step` on."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    step: int
    changed: dict[str, tuple[Any, Any]]


_ROW = reading.checker(ChangesRow)


def change_run(
    config: Config, settings: Iterable[tuple[str, Any]], where: str, own_drafter: bool
) -> tuple[Config, Changes, set[str]]:
    """A run's config with some settings changed -> it, what differs, and the keys that were named. `own_drafter`: its
    newest checkpoint has one that the run has trained."""
    after, named = change_settings(config, settings, where)
    old = dict(flat(config.model_dump(mode="json")))
    new = dict(flat(after.model_dump(mode="json")))
    changes = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
    for key, (before, _) in changes.items():
        if why := _why_fixed(key, before, own_drafter):
            raise UserError(f"'{key}' cannot change in a run that is resumed: {why}; {START}")
    return after, changes, named


def _why_fixed(key: str, before: Any, own_drafter: bool) -> str | None:
    """Why a setting keeps its value; None if it may change."""
    if key == "learn.kl_coef" and not before:
        return "it began without the frozen copy of its first policy that the KL divergence is measured to"
    if key == "speculation.drafter" and own_drafter:
        return "it has trained a drafter of its own, which is in its checkpoints"
    return next((why for name, why in FIXED.items() if key == name or key.startswith(f"{name}.")), None)


def describe_changes(changes: Changes) -> str:
    """For a line on the terminal: `learn.lr 1e-06 -> 2e-06, steps 4 -> 8`."""
    return ", ".join(f"{key} {_shown(before)} -> {_shown(after)}" for key, (before, after) in changes.items())


def _shown(value: Any) -> str:
    return reading.shorten(json.dumps(value, ensure_ascii=False).strip('"'), 60)


def write_changes(folder: Path, step: int, changes: Changes) -> None:
    append_line(folder / CHANGES, {"step": step, "changed": changes})


def read_changes(folder: Path) -> list[tuple[int, Changes]]:
    """(the last step before them, what changed), in order."""
    file = folder / CHANGES
    rows = (_ROW(row, f"row {number} of {file}") for number, (_, row) in enumerate(read_rows(file), 1))
    return [(row["step"], row["changed"]) for row in rows]
