"""Daily series by name, from the arch package, or from a file of one's own."""

from __future__ import annotations

import csv
import importlib
import io
import math
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UserError
from paceline.files.reading import read_text, shorten
from paceline.tasks.data_files import SUFFIXES, read_files

Floats = NDArray[np.float64]

SHIPPED = {"sp500": "Adj Close", "nasdaq": "Adj Close", "vix": "vix", "wti": "DCOILWTICO"}
"""Series that arch ships, and the column of each."""
MAX_CSV_BYTES = 256 * 2**20
CSV = ".csv"


@dataclass(frozen=True)
class Series:
    """Positive values by day: prices, or an index such as the VIX."""

    name: str
    days: list[date]
    """In order, each once."""
    values: Floats

    @property
    def returns(self) -> Floats:
        """Percent, 100 log(v[t] / v[t-1]); the first day has none and is NaN."""
        out = np.full(len(self.values), np.nan)
        out[1:] = 100.0 * np.diff(np.log(self.values))
        return out


def read_series(name: str, day_column: str, value_column: str) -> Series:
    """One that arch ships, or a .csv, .jsonl, .json or .parquet file with a day and a value in each row."""
    if name in SHIPPED:
        return _shipped(name)
    path = Path(name)
    if path.suffix not in (CSV, *SUFFIXES):
        raise UserError(
            f"task.name = 'forecast:{shorten(name, 200)}' is no series: use {', '.join(SHIPPED)}, or a .csv, .jsonl, "
            ".json or .parquet file with a day and a value in each row"
        )
    rows = _read_csv(path) if path.suffix == CSV else list(read_files([path]).rows)
    return _series(str(path), [_row(row, path, n, day_column, value_column) for n, row in enumerate(rows)])


def _shipped(name: str) -> Series:
    try:
        data = importlib.import_module(f"arch.data.{name}")
    except ImportError as err:
        raise UserError(f"forecast:{name} needs arch: pip install 'paceline[forecast]'") from err
    column = data.load()[SHIPPED[name]].dropna()
    return _series(name, [(day.date(), float(value)) for day, value in column.items() if value > 0])


def _read_csv(path: Path) -> list[dict[str, Any]]:
    text = read_text(path, MAX_CSV_BYTES)
    try:
        return list(csv.DictReader(io.StringIO(text), strict=True))
    except csv.Error as err:
        raise UserError(f"{path} is not a CSV file: {err}") from err


def _row(row: Any, path: Path, number: int, day_column: str, value_column: str) -> tuple[date, float]:
    where = f"row {number} (counted from 0) of {path}"
    if not isinstance(row, dict):
        raise UserError(f"{where} is no row with columns")
    for column, option in ((day_column, "day_column"), (value_column, "value_column")):
        if row.get(column) is None:
            raise UserError(f"{where} has no {column}; task.options.{option} names the column")
    try:
        day = date.fromisoformat(str(row[day_column])[:10])
        value = float(row[value_column])
    except (ValueError, TypeError) as err:
        raise UserError(f"{where} is not a day (as 2018-12-31) and a number: {shorten(str(err), 100)}") from err
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{where} has the value {value}; returns need positive ones")
    return day, value


def _series(name: str, rows: list[tuple[date, float]]) -> Series:
    days = [day for day, _ in rows]
    for before, after in pairwise(days):
        if after <= before:
            raise UserError(f"{name} has {after} behind {before}: its days must be in order, each once")
    return Series(name, days, np.array([value for _, value in rows]))
