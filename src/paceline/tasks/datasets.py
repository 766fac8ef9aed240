"""Data sets as tasks: files and hub data sets, in TRL's form or in verl's.

TRL's: a `prompt` column, as text or as messages, and any other columns, which rewards get by name. verl's:
`data_source`, `prompt`, `reward_model.ground_truth` and `extra_info`, which become columns of the same names, and
`ground_truth`. Or any columns, of which `task.template` makes prompts.

All rows are checked before a run begins: a bad one is named with its line or row, not met hours later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.core import Prompt, Sample
from paceline.errors import UserError
from paceline.tasks.data_files import DataRows
from paceline.tasks.data_sources import reward_of
from paceline.tasks.hub import check_hub, hub_row, hub_rows
from paceline.tasks.rows import check_sendable
from paceline.tasks.sample import SampleOrder
from paceline.tasks.wording import Wording


class DataSet:
    def __init__(
        self,
        name: str,
        rows: Sequence[Any] | DataRows,
        wording: Wording | None = None,
        shuffle: bool = True,
        seed: int = 0,
        sent: bool = False,
    ):
        """`sent` says that rows are objects from Python that will go to reward processes, so that they must be such
        that they can."""
        self.name = name
        self.wording = wording or Wording()
        self.given = rows if isinstance(rows, DataRows) else DataRows(rows)
        self.rows = self.given.rows
        if not len(self.rows):
            raise UserError(f"{name} holds no samples")
        self._check(sent)
        self.reword(self.wording)
        self.numbers: Sequence[int] = range(self.wording.few_shot, len(self.rows))
        """Of the rows that are visited."""
        if not self.numbers:
            raise UserError(f"all {len(self.rows)} rows of {name} are examples for task.few_shot; none is left to ask")
        self.seed = seed
        self.shuffle = shuffle
        self.order = SampleOrder(len(self.numbers), seed, shuffle)

    @property
    def reward(self) -> str | None:
        """verl's scoring, where all rows say where they are from."""
        return reward_of(self._sources()) if self._has_sources() else None

    def sample(self, index: int) -> Sample:
        return self._sample(index, self.numbers[self.order.at(index)])

    def reword(self, wording: Wording) -> None:
        shots = range(min(wording.few_shot, len(self.rows)))
        if shots:
            wording.take_shots([(self._row(number), self.origin(number)) for number in shots])
        self.wording = wording

    def leave_out(self, fits: Callable[[Prompt, str], bool], keep: bool = False) -> int:
        """Visit only rows whose prompt, and what says which row it is, make `fits` true, unless `keep` says to visit
        the others too -> how many there are. Called before the first sample is asked for."""
        numbers = self.numbers
        kept = [number for number, prompt in self._prompts() if fits(prompt, self.origin(number))]
        if kept and not keep and len(kept) < len(numbers):
            self.numbers = kept
            self.order = SampleOrder(len(kept), self.seed, self.shuffle)
        return len(numbers)

    def origin(self, number: int) -> str:
        return self.given.origin(number, self.name)

    def _sample(self, index: int, number: int) -> Sample:
        origin = self.origin(number)
        row = self._row(number)
        self.wording.check(row, origin)  # a row may be made when it is asked for
        return self.wording.sample(index, row, origin)

    def _row(self, number: int) -> Any:
        if hasattr(self.rows, "column_names"):  # of the datasets library: it decodes what it reads
            return hub_row(self.rows, number, self.origin(number))
        try:
            return self.rows[number]
        except (LookupError, TypeError) as err:  # columns by name, or a table of another library
            raise UserError(
                f"{self.name} is of type {type(self.rows).__name__}, whose rows have no numbers; give a list with an "
                "object of columns for each row"
            ) from err

    def _check(self, sent: bool) -> None:
        if hasattr(self.rows, "column_names"):
            check_hub(self.rows, self.wording, self.origin)
            return
        for number in range(len(self.rows)):
            row = self._row(number)
            origin = self.origin(number)
            self.wording.check(row, origin)
            if sent:
                check_sendable(dict(row), origin)

    def _prompts(self) -> Iterator[tuple[int, Prompt]]:
        """Of the rows that are visited."""
        first = self.numbers[0]
        rows = ((number, row) for number, row in self._columns(self.wording.needed) if number >= first)
        return ((number, self.wording.prompt(row, self.origin(number))) for number, row in rows)

    def _columns(self, names: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """(number, row) of all rows, with at least these columns."""
        if hasattr(self.rows, "column_names"):
            yield from hub_rows(self.rows, names, self.origin)
        else:
            yield from ((number, self._row(number)) for number in range(len(self.rows)))

    def _has_sources(self) -> bool:
        if hasattr(self.rows, "column_names"):
            return "data_source" in self.rows.column_names
        return all("data_source" in row for _, row in self._columns([]))

    def _sources(self) -> Iterator[tuple[Any, str]]:
        """(data_source, which row it is) of all rows."""
        return ((row["data_source"], self.origin(number)) for number, row in self._columns(["data_source"]))
