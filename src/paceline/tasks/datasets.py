"""Data sets as tasks: JSONL and parquet files and hub data sets, in TRL's form or in verl's.

TRL's: a `prompt` column, as text or as messages, and any other columns, which rewards get by name. verl's:
`data_source`, `prompt`, `reward_model.ground_truth` and `extra_info`, which become columns of the same names, and
`ground_truth`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.tasks.sample import Order, Prompt, Sample


class DataSet:
    reward: str | None = None

    def __init__(
        self,
        name: str,
        rows: Sequence[dict[str, Any]],
        prompt_column: str = "prompt",
        system: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ):
        self.name, self.rows, self.prompt_column, self.system = name, rows, prompt_column, system
        if not len(rows):
            raise UserError(f"{name} holds no samples")
        if prompt_column not in rows[0]:
            columns = ", ".join(rows[0]) or "none"
            raise UserError(
                f"{name} has no column '{prompt_column}' to take prompts from; it has: {columns}; "
                "name the right one with task.prompt_column"
            )
        self.order = Order(len(rows), seed, shuffle)
        self.sample(0)

    def sample(self, index: int) -> Sample:
        place = self.order.at(index)
        row = dict(self.rows[place])
        prompt = self._prompt(row.pop(self.prompt_column), place)
        marks = row.get("reward_model")
        if isinstance(marks, dict) and "ground_truth" in marks:
            row["ground_truth"] = marks["ground_truth"]
        return Sample(index, prompt, row)

    def _prompt(self, value: Any, row: int) -> Prompt:
        if isinstance(value, str):
            if not value:
                raise UserError(f"row {row} of {self.name} has an empty prompt")
            return value if self.system is None else [_message("system", self.system), _message("user", value)]
        messages = list(value) if value is not None else []
        if not messages or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
            raise UserError(
                f"the prompt in row {row} of {self.name} is neither text nor messages with role and content"
            )
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, _message("system", self.system))
        return messages


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def read_file(path: Path) -> Sequence[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"no data set at {path}")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as err:
            raise UserError(f"{path} cannot be read as parquet: {err}") from err
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as err:
            raise UserError(f"line {number} of {path} is not valid JSON: {err}") from err
        if not isinstance(row, dict):
            raise UserError(f"line {number} of {path} is not an object with columns")
        rows.append(row)
    return rows


def read_hub(name: str, split: str) -> Sequence[dict[str, Any]]:
    try:
        import datasets
    except ImportError as err:
        raise UserError("hub data sets need the datasets package: pip install 'paceline[hub]'") from err
    try:
        return datasets.load_dataset(name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as err:
        reason = str(err).strip().partition("\n")[0]
        raise UserError(f"the hub gave no split '{split}' of a data set '{name}': {reason}") from err
