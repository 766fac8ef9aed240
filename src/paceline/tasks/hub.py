"""Data sets of the datasets library: from the hub by their id, and folders that are laid out like them.

A name may end with a configuration and with a revision: `openai/gsm8k:main`, `openai/gsm8k:main@e53f048`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.tasks.data_files import BATCH
from paceline.tasks.rows import refuse_column
from paceline.tasks.wording import Wording


@dataclass(frozen=True)
class HubName:
    path: str
    """An id of the hub, or a folder."""
    configuration: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName:
        rest, _, revision = text.partition("@")
        path, _, configuration = rest.partition(":")
        if not path or text.endswith((":", "@")):
            raise UserError(f"'hub:{shorten(text)}' is not a data set: write hub:OWNER/NAME or hub:OWNER/NAME:CONFIG")
        return cls(path, configuration or None, revision or None)


def find_folder(name: str) -> HubName | None:
    """A folder, or a folder and a configuration; None if there is no such folder."""
    folder = os.path.expanduser(name)
    if os.path.isdir(folder):  # which says no of names that no folder can have
        return HubName(folder)
    path, colon, configuration = folder.rpartition(":")
    if colon and configuration and os.path.isdir(path):
        return HubName(path, configuration)
    return None


def read_hub(name: HubName, split: str, streaming: bool = False) -> Any:
    """A `datasets.Dataset`, or with `streaming` an `IterableDataset`."""
    library = _library()
    where = f"a data set '{name.path}'" if not Path(name.path).is_dir() else f"the folder {name.path}"
    try:
        found = library.load_dataset(
            name.path, name.configuration, split=split, revision=name.revision, streaming=streaming
        )
    except Exception as err:  # a builder may fail in any way on files that others have uploaded
        if several := _configurations(name):
            given = f"no configuration '{name.configuration}'" if name.configuration else "several configurations"
            raise UserError(
                f"{where} has {given}; name one of {shorten(', '.join(several), 300)}, like "
                f"task.name={_spelled(name)}:{several[0]}"
            ) from err
        reason = shorten(str(err).strip().partition("\n")[0], 300)
        raise UserError(f"the datasets library gave no split '{split}' of {where}: {reason}") from err
    return found


def _configurations(name: HubName) -> list[str]:
    """Those that there are, if the one that was named is none of them, or none was named where one must be."""
    try:
        known = _library().get_dataset_config_names(name.path, revision=name.revision)
    except Exception:  # noqa: BLE001 (what is wrong was raised before, and is told)
        return []
    unnamed = name.configuration is None and len(known) > 1 and "default" not in known
    return known if unnamed or (name.configuration is not None and name.configuration not in known) else []


def _spelled(name: HubName) -> str:
    return name.path if Path(name.path).is_dir() else f"hub:{name.path}"


def _library() -> Any:
    try:
        import datasets
    except ImportError as err:
        raise UserError("hub data sets and folders need the datasets package: pip install 'paceline[hub]'") from err
    return datasets


def check_hub(rows: Any, wording: Wording, origin: Callable[[int], str]) -> None:
    """Rows of the datasets library have the same columns, so those that are needed are enough; others, which may be
    pictures, are not unpacked."""
    for name in wording.needed:
        if name not in rows.column_names:
            refuse_column(name, wording.asked_by(name), rows.column_names, origin(0))
    for number, row in hub_rows(rows, wording.needed, origin):
        wording.check(row, origin(number))


def hub_rows(rows: Any, names: list[str], origin: Callable[[int], str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, row) of all rows with these columns, read in batches. None of a data set whose rows are made by a
    function of the user's, from all columns of a row: those are seen when they are asked for."""
    if (rows.format or {}).get("type") == "custom":
        return
    chosen = rows.select_columns(names)
    for start in range(0, len(rows), BATCH):
        batch = hub_row(chosen, slice(start, start + BATCH), f"rows {start} and on, {origin(start)}")
        for number, values in enumerate(zip(*(batch[name] for name in names), strict=True), start):
            yield number, dict(zip(names, values, strict=True))


def hub_row(rows: Any, number: int | slice, where: str) -> Any:
    try:
        return rows[number]
    except Exception as err:  # decoders of columns are other libraries, and may be the user's functions
        raise UserError(f"{where} cannot be read: {type(err).__name__}: {shorten(str(err), 200)}") from err
