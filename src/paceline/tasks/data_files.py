"""Data files: JSONL, JSON and parquet, one or several, read into memory."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from paceline.errors import UserError
from paceline.files.reading import decode, named_path, open_file, parse_json, read_lines, shorten

SUFFIXES = (".jsonl", ".json", ".parquet")
MAX_BYTES = 8 * 2**30
"""Of a file, and of what a compressed one unpacks to: its rows are held in memory."""
MAX_ROW_BYTES = 64 * 2**20
"""Of a line. A row is a prompt and what its reward needs to know."""
MAX_FILES = 10_000
BATCH = 1024  # rows that are unpacked at once


@dataclass
class DataRows:
    """Rows of files, and where each of them came from."""

    rows: Sequence[Any]
    lines: Sequence[int] = field(default_factory=tuple)
    """Of a file that has lines: the line of each row."""
    parts: Sequence[tuple[int, Path, DataRows]] = field(default_factory=tuple)
    """Of several files: at which row each begins, and its own rows."""

    def origin(self, number: int, name: str) -> str:
        """Which row of what is called `name` this is."""
        if self.parts:
            start, path, part = self.parts[bisect_right(self.parts, number, key=lambda one: one[0]) - 1]
            return part.origin(number - start, str(path))
        if self.lines:
            return f"line {self.lines[number]} of {name}"
        return f"row {number} (counted from 0) of {name}"


def find_files(name: str) -> list[Path] | None:
    """The files that a task's name stands for: one, a pattern, or several separated by commas. None if it does not name
    data files at all."""
    whole = Path(os.path.expanduser(name))
    if whole.suffix in SUFFIXES and os.path.exists(whole):  # which says no of names that no file can have
        return [whole]  # whatever characters its name has
    parts = [part.strip() for part in name.split(",") if part.strip()]
    if not parts or not all(Path(part).suffix in SUFFIXES or glob.has_magic(part) for part in parts):
        return None
    found: list[Path] = []
    for part in parts:
        path = named_path(part)
        if path.exists() or not glob.has_magic(part):
            found.append(path)
            continue
        matches = map(Path, sorted(glob.glob(os.path.expanduser(part), recursive=True)))
        files = [match for match in matches if match.suffix in SUFFIXES]
        if not files:
            raise UserError(f"no {', '.join(SUFFIXES)} file matches {shorten(part, 200)}")
        found += files
    if len(found) > MAX_FILES:
        raise UserError(f"{shorten(name, 200)} stands for {len(found):,} files; name at most {MAX_FILES:,}")
    return list(dict.fromkeys(found))


def read_files(paths: Sequence[Path]) -> DataRows:
    """The rows of one file after the other's."""
    if len(paths) == 1:
        return read_file(paths[0])
    rows: list[Any] = []
    parts: list[tuple[int, Path, DataRows]] = []
    for path in paths:
        part = read_file(path)
        if not len(part.rows):
            raise UserError(f"{path} holds no samples")
        parts.append((len(rows), path, part))
        rows += part.rows
    return DataRows(rows, parts=parts)


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
