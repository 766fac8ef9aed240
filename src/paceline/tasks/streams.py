"""Data sets that are read row by row while the run goes on, for those too large to be read before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from paceline.core import Prompt, Sample, mix_seed
from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.tasks.data_sources import reward_of
from paceline.tasks.wording import Wording

SHUFFLE_BUFFER = 1000
"""Rows from which the next one is drawn."""
REMEMBERED = 10_000
"""Samples that can be asked for again without reading all from the beginning."""


class StreamedDataSet:
    """The order is a function of the seed, so a sample is one of its index; but to come to it, all before it are read:
    a run that is resumed reads again what it has read."""

    def __init__(self, name: str, rows: Any, wording: Wording, shuffle: bool, seed: int):
        """`rows` is an `IterableDataset` of the datasets library."""
        self.name = name
        self.wording = wording
        self.fits: Callable[[Prompt, str], bool] = lambda prompt, where: True
        first = self._read(rows, 0, max(1, wording.few_shot))
        if not first:
            raise UserError(f"{name} holds no samples")
        if wording.few_shot:
            wording.take_shots(first)
            rows = rows.skip(wording.few_shot)
        self.rows = rows.shuffle(seed=mix_seed(seed, "stream") % 2**31, buffer_size=SHUFFLE_BUFFER) if shuffle else rows
        self._first = first[0]
        self._restart()

    @property
    def reward(self) -> str | None:
        """verl's scoring, where the first row says where it is from; others are looked at when their turn comes."""
        row, where = self._first
        return reward_of([(row["data_source"], where)]) if "data_source" in row else None

    def leave_out(self, fits: Callable[[Prompt, str], bool], keep: bool = False) -> None:
        """Pass over rows of which `fits` is not true, as they come; with `keep` none is."""
        if not keep:
            self.fits = fits
            self._restart()

    def sample(self, index: int) -> Sample:
        if index < self._next - len(self._recent):
            self._restart()
        while index >= self._next:
            self._recent.append(next(self._samples))
            self._next += 1
        return self._recent[index - self._next]

    def _restart(self) -> None:
        self._next = 0
        self._recent: deque[Sample] = deque(maxlen=REMEMBERED)
        self._samples = self._endless()

    def _endless(self) -> Iterator[Sample]:
        """All samples, one epoch after the other, each in an order of its own."""
        index = 0
        epoch = 0
        while True:
            before = index
            self.rows.set_epoch(epoch)
            for row, where in self._rows(self.rows, f"of epoch {epoch + 1} of {self.name}"):
                if self.fits(self.wording.prompt(row, where), where):
                    yield self.wording.sample(index, row, where)
                    index += 1
            if index == before:
                raise UserError(f"no row of {self.name} can be asked: all prompts are too long, or there are none")
            epoch += 1

    def _read(self, rows: Any, start: int, count: int) -> list[tuple[Mapping[str, Any], str]]:
        return list(islice(self._rows(rows, f"of {self.name}", start), count))

    def _rows(self, rows: Any, of: str, start: int = 0) -> Iterator[tuple[Mapping[str, Any], str]]:
        """(row, which it is), checked."""
        number = start
        source = iter(rows)
        while True:
            where = f"row {number} (counted from 0) {of}"
            try:
                row = next(source, None)
            except Exception as err:  # the network, files of others, their decoders
                raise UserError(f"{where} cannot be read: {type(err).__name__}: {shorten(str(err), 200)}") from err
            if row is None:
                return
            self.wording.check(row, where)
            yield row, where
            number += 1
