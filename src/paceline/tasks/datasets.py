"""Data sets as tasks: JSONL, JSON and parquet files and hub data sets, in TRL's form or in verl's.

TRL's: a `prompt` column, as text or as messages, and any other columns, which rewards get by name. verl's:
`data_source`, `prompt`, `reward_model.ground_truth` and `extra_info`, which become columns of the same names, and
`ground_truth`.

All rows are checked before a run begins: a bad one is named with its line or row, not met hours later.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from paceline.core import Prompt, Sample
from paceline.errors import UserError
from paceline.files.reading import decode, open_file, parse_json, read_lines, shorten
from paceline.tasks.rows import as_prompt, check_row, check_sendable
from paceline.tasks.sample import SampleOrder

MAX_BYTES = 8 * 2**30
"""Of a file, and of what a compressed one unpacks to: its rows are held in memory."""
MAX_ROW_BYTES = 64 * 2**20
"""Of a line. A row is a prompt and what its reward needs to know."""
BATCH = 1024  # rows that are unpacked at once


@dataclass
class DataRows:
    """Rows of a file, and where each of them came from."""

    rows: Sequence[Any]
    lines: Sequence[int] = field(default_factory=tuple)
    """Of a file that has lines: the line of each row."""


class DataSet:
    reward: str | None = None

    def __init__(
        self,
        name: str,
        rows: Sequence[Any] | DataRows,
        prompt_column: str = "prompt",
        system: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        sent: bool = False,
    ):
        """`sent` says that rows are objects from Python that will go to reward processes, so that they must be such
        that they can."""
        given = rows if isinstance(rows, DataRows) else DataRows(rows)
        self.name = name
        self.prompt_column = prompt_column
        self.system = system
        self.rows = given.rows
        self.lines = given.lines
        if not len(self.rows):
            raise UserError(f"{name} holds no samples")
        self._check(sent)
        self.order = SampleOrder(len(self.rows), seed, shuffle)

    def sample(self, index: int) -> Sample:
        number = self.order.at(index)
        origin = self.origin(number)
        row = self._row(number)
        check_row(row, self.prompt_column, origin)  # a row may be made when it is asked for
        columns = dict(row)
        prompt = self._prompt(columns.pop(self.prompt_column))
        marks = columns.get("reward_model")
        if isinstance(marks, dict) and "ground_truth" in marks:
            columns["ground_truth"] = marks["ground_truth"]
        return Sample(index, prompt, columns, origin)

    def origin(self, number: int) -> str:
        if self.lines:
            return f"line {self.lines[number]} of {self.name}"
        return f"row {number} (counted from 0) of {self.name}"

    def _row(self, number: int) -> Any:
        if hasattr(self.rows, "column_names"):  # of the datasets library: it decodes what it reads
            return _hub_row(self.rows, number, self.origin(number))
        try:
            return self.rows[number]
        except (LookupError, TypeError) as err:  # columns by name, or a table of another library
            raise UserError(
                f"{self.name} is of type {type(self.rows).__name__}, whose rows have no numbers; give a list with an "
                "object of columns for each row"
            ) from err

    def _check(self, sent: bool) -> None:
        if hasattr(self.rows, "column_names"):
            _check_hub(self.rows, self.prompt_column, self.origin)
            return
        for number in range(len(self.rows)):
            row = self._row(number)
            origin = self.origin(number)
            check_row(row, self.prompt_column, origin)
            if sent:
                check_sendable(dict(row), origin)

    def _prompt(self, value: Any) -> Prompt:
        prompt = as_prompt(value)
        if self.system is None:
            return prompt
        if isinstance(prompt, str):
            return [_message("system", self.system), _message("user", prompt)]
        return prompt if prompt[0]["role"] == "system" else [_message("system", self.system), *prompt]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def read_file(path: Path) -> DataRows:
    """The rows of a .jsonl, .json or .parquet file, held in memory."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a .jsonl, .json or .parquet file in it")
    if not path.exists():
        raise UserError(f"no data set at {shorten(str(path), 200)}")
    with os.fdopen(open_file(path), "rb") as file:
        if path.suffix == ".parquet":
            return DataRows(_read_parquet(file, path))
        if path.suffix == ".json" and file.peek(1024).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return DataRows(_read_array(file, path))
        return _read_lines(path)


def _read_lines(path: Path) -> DataRows:
    rows: list[Any] = []
    lines: list[int] = []
    size = 0
    for number, line in read_lines(path, MAX_ROW_BYTES):
        size += len(line)
        if size > MAX_BYTES:
            raise UserError(_too_large(path))
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as err:
            raise UserError(f"{where} is not UTF-8 text; save it as UTF-8") from err
        row = parse_json(text.removeprefix("\ufeff") if number == 1 else text, where)
        if not isinstance(row, dict):
            raise UserError(f"{where} is not an object with columns")
        rows.append(row)
        lines.append(number)
    return DataRows(rows, lines)


def _read_array(file: IO[bytes], path: Path) -> list[dict[str, Any]]:
    try:
        data = file.read(MAX_BYTES + 1)
    except OSError as err:
        raise UserError(f"{path} cannot be read: {err.strerror}") from err
    if len(data) > MAX_BYTES:
        raise UserError(_too_large(path))
    rows = parse_json(decode(data, str(path)), str(path))
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"row {number} (counted from 0) of {path} is not an object with columns")
    return rows


def _read_parquet(file: IO[bytes], path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    rows: list[dict[str, Any]] = []
    size = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(BATCH):
                size += batch.nbytes
                if size > MAX_BYTES:
                    raise UserError(_too_large(path))
                rows += batch.to_pylist()
    # Besides its own errors the library raises what Python's constructors do, for dates that do not exist, for example.
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        AttributeError,
        ImportError,
        MemoryError,
        RecursionError,
    ) as err:
        near = f" near row {len(rows)} (counted from 0)" if rows else ""
        raise UserError(f"{path} cannot be read as parquet{near}: {shorten(str(err), 200)}") from err
    return rows


def _too_large(path: Path) -> str:
    return (
        f"{path} holds more than {MAX_BYTES:,} bytes, which are read into memory; name a part of it, or a hub data set"
    )


def read_hub(name: str, split: str) -> Sequence[dict[str, Any]]:
    try:
        import datasets
    except ImportError as err:
        raise UserError("hub data sets need the datasets package: pip install 'paceline[hub]'") from err
    try:
        found = datasets.load_dataset(name, split=split)
    except Exception as err:  # a builder may fail in any way on files that others have uploaded
        reason = shorten(str(err).strip().partition("\n")[0], 300)
        raise UserError(f"the hub gave no split '{split}' of a data set '{name}': {reason}") from err
    return found


def _check_hub(rows: Any, prompt_column: str, origin: Any) -> None:
    """Rows of the datasets library have the same columns, so the prompts are enough, in batches; other columns, which
    may be pictures, are not unpacked."""
    if prompt_column not in rows.column_names:
        check_row(dict.fromkeys(rows.column_names), prompt_column, origin(0))
    if (rows.format or {}).get("type") == "custom":
        return  # made by the user's function from all columns of a row: checked when it is asked for
    prompts = rows.select_columns([prompt_column])
    for start in range(0, len(rows), BATCH):
        batch = _hub_row(prompts, slice(start, start + BATCH), f"rows {start} and on, {origin(start)}")
        for number, prompt in enumerate(batch[prompt_column], start):
            check_row({prompt_column: prompt}, prompt_column, origin(number))


def _hub_row(rows: Any, number: int | slice, where: str) -> Any:
    try:
        return rows[number]
    except Exception as err:  # decoders of columns are other libraries, and may be the user's functions
        raise UserError(f"{where} cannot be read: {type(err).__name__}: {shorten(str(err), 200)}") from err
