"""Tasks by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.tasks.countdown import Countdown, Style
from paceline.tasks.data_files import find_files, read_files
from paceline.tasks.datasets import DataSet
from paceline.tasks.forecast import Forecast
from paceline.tasks.grid import Grid
from paceline.tasks.gym import Gym
from paceline.tasks.hub import HubName, find_folder, read_hub
from paceline.tasks.sample import Task
from paceline.tasks.streams import StreamedDataSet
from paceline.tasks.wording import Wording

if TYPE_CHECKING:
    from paceline.config import TaskConfig

STREAMED = "task.streaming reads hub data sets and folders row by row; {} is read as a whole"


def make_task(config: TaskConfig, seed: int, style: Style) -> Task:
    """`style` is how prompts are worded where the task has a choice (see `TaskConfig.style`)."""
    name = config.name
    if name == "countdown":
        return Countdown(config.difficulty, style, seed, config.problems)
    if name.startswith("gym:"):
        return Gym(name.removeprefix("gym:"), config.options, style, seed)
    if name.startswith("forecast:"):
        return Forecast(name.removeprefix("forecast:"), config.options, style, config.split, config.shuffle, seed)
    if name.startswith("grid:"):
        return Grid(name.removeprefix("grid:"), config.options, config.difficulty, style, config.split, seed)
    wording = Wording.of(config, style)
    hub = HubName.parse(name.removeprefix("hub:")) if name.startswith("hub:") else find_folder(name)
    if hub is not None:
        rows = read_hub(hub, config.split, config.streaming)
        if config.streaming:
            return StreamedDataSet(name, rows, wording, config.shuffle, seed)
        return DataSet(name, rows, wording, config.shuffle, seed)
    files = find_files(name)
    if files is None:
        raise UserError(
            f"task.name = '{shorten(name, 200)}' is not a task: use countdown, gym:NAME, forecast:NAME, grid:NAME, "
            "hub:OWNER/NAME, a .jsonl, .json or .parquet file, or a folder with a data set"
        )
    if config.streaming:
        raise UserError(STREAMED.format(shorten(name, 200)))
    return DataSet(name, read_files(files), wording, config.shuffle, seed)


def reworded(task: Task, config: TaskConfig, style: Style) -> Task:
    """Rows from Python, for a model that was not known when they were given."""
    if isinstance(task, DataSet) and task.wording.template:
        task.reword(Wording.of(config, style))
    return task


def choose_style(wanted: str, model: dict[str, Any], has_template: bool) -> Style:
    """A model that knows only one format says so in its config.json; others are asked in words, or in a chat."""
    own = model.get("paceline", {}).get("style")
    return cast(Style, wanted if wanted != "auto" else own or ("chat" if has_template else "text"))
