"""What one call of reward functions is about: the finished completions that it is for, and what it may log.

`per` says what a function is given in one call: a completion, as soon as it is finished; the whole group of a prompt,
once all of it is; or whatever has arrived when a process is free. A function asks for it with the decorator `per`, or
the setting `reward.functions[].per` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from paceline.core import Sample
from paceline.files.reading import shorten
from paceline.tasks.reward_errors import BadReward

Per = Literal["completion", "group", "arrived"]
PER: tuple[Per, ...] = get_args(Per)
MAX_LOGGED = 1000  # characters of a value of `log_extra`
MAX_NAMES = 8  # of metrics, and of columns, that are logged in a call
Function = TypeVar("Function", bound=Callable[..., Any])


def per(what: Per) -> Callable[[Function], Function]:
    """Decorates a reward function: it is called per `completion`, `group` or with what has `arrived`."""

    def asking(function: Function) -> Function:
        function.per = what  # type: ignore[attr-defined]
        return function

    return asking


@dataclass(frozen=True)
class FinishedAnswer:
    """A finished completion, decoded, to be rewarded."""

    request_id: int
    sample: Sample
    text: str
    """Of a conversation, its last turn."""
    tokens: list[int]
    messages: list[dict[str, Any]] | None = None
    """A conversation, from the first turn on."""


@dataclass
class RewardCall:
    """Completions that the functions with the same `per` get in one call each."""

    per: Per
    answers: list[FinishedAnswer]

    @property
    def chars(self) -> int:
        return sum(len(answer.text) for answer in self.answers)

    @property
    def key(self) -> tuple[Per, int]:
        """No other call of a step has it."""
        return self.per, self.answers[0].request_id


@dataclass
class MeanOf:
    """A number that was logged several times."""

    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count

    def __add__(self, other: MeanOf) -> MeanOf:
        return MeanOf(self.total + other.total, self.count + other.count)


@dataclass
class RewardLog:
    """What reward functions log in a call, in TRL's words: `log_metric(name, value)` a number for the step, of which
    the mean is recorded, `log_extra(column, values)` something of each completion for samples.jsonl."""

    metrics: dict[str, MeanOf] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        name = self._name(name, self.metrics, "log_metric")
        try:
            number = float(value)
        except (TypeError, ValueError) as err:
            raise BadReward(f"logged {shorten(repr(value))} as the metric '{name}', which is not a number") from err
        if math.isfinite(number):
            self.metrics[name] = self.metrics.get(name, MeanOf()) + MeanOf(number, 1)

    def extra(self, column: str, values: Sequence[Any], count: int) -> None:
        column = self._name(column, self.extras, "log_extra")
        if len(values) != count:
            raise BadReward(f"logged {len(values)} values as '{column}' for {count} completions")
        self.extras[column] = [_plain(value) for value in values]

    def _name(self, name: str, known: Mapping[str, Any], function: str) -> str:
        name = shorten(str(name))
        if name not in known and len(known) >= MAX_NAMES:
            raise BadReward(f"calls {function} with more than {MAX_NAMES} different names")
        return name


def _plain(value: Any) -> Any:
    """As it can stand in a file of JSON, and no longer than somebody reads."""
    if value is None or isinstance(value, bool | int | float):
        return value
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return shorten(text, MAX_LOGGED)
