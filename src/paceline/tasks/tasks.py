"""From a setting to a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import UserError
from paceline.files.reading import named_path, shorten
from paceline.tasks.countdown import Countdown, Style
from paceline.tasks.datasets import DataRows, DataSet, read_file, read_hub
from paceline.tasks.gym import Gym
from paceline.tasks.sample import Task

if TYPE_CHECKING:
    from paceline.config import TaskConfig


def make_task(config: TaskConfig, seed: int, style: Style) -> Task:
    """`style` is how prompts are worded where the task has a choice (see `TaskConfig.style`)."""
    name = config.name
    if name == "countdown":
        return Countdown(config.difficulty, style, seed, config.problems)
    if name.startswith("gym:"):
        return Gym(name.removeprefix("gym:"), config.options, style, seed)
    rows: DataRows | Sequence[Any]
    if name.startswith("hub:"):
        rows = read_hub(name.removeprefix("hub:"), config.split)
    elif Path(name).suffix in (".jsonl", ".json", ".parquet"):
        rows = read_file(named_path(name))
    else:
        raise UserError(
            f"task.name = '{shorten(name, 200)}' is not a task: use countdown, gym:NAME, hub:ID, "
            "or a .jsonl, .json or .parquet file"
        )
    return DataSet(name, rows, config.prompt_column, config.system, config.shuffle, seed)


def choose_style(wanted: str, model: dict[str, Any], has_template: bool) -> Style:
    """A model that knows only one format says so in its config.json; others are asked in words, or in a chat."""
    own = model.get("paceline", {}).get("style")
    return cast(Style, wanted if wanted != "auto" else own or ("chat" if has_template else "text"))
