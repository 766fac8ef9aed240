"""Windows of a series as samples. Everything that a sample or a score knows of other days is from before the test
part begins: days are split by time, never by chance."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.core import Prompt, Sample
from paceline.errors import UserError
from paceline.tasks.forecast.scores import LEVELS, REGIMES, WORST, parse_prediction, score
from paceline.tasks.forecast.series import Floats, read_series
from paceline.tasks.sample import SampleOrder, text_of

SPLITS = ("train", "test")
REGIME_LEVELS = (0.5, 0.85)
"""Quantiles of the absolute return in the train part, which part the regimes."""
SCALE = 2.0  # standard deviations, from which on larger returns count hardly more
MIN_SAMPLES = 30  # of each part
TEST_SHARE = 0.25  # of the days, where test_from does not say

QUESTION = (
    "Daily returns of {name} in percent, oldest first: {returns}\n"
    "Forecast the next day: the 5, 25, 50, 75 and 95 % quantiles of its return in percent, and the probabilities in "
    "percent that its absolute return is calm (below {low}), normal, or turbulent (above {high})."
)
HOW = (
    " Think about how volatile the series is now, then give the eight numbers in this order inside <answer> </answer>."
)


class ForecastOptions(BaseModel):
    """`task.options` of this task."""

    model_config = ConfigDict(extra="forbid")
    window: int = Field(20, ge=1, le=1000)
    """Days that the prompt shows."""
    test_from: date | None = None
    """The first day that is forecast in the test part; by default the last quarter of the days."""
    decimals: int = Field(2, ge=0, le=4)
    """Of the returns in the prompt."""
    day_column: str = "date"
    value_column: str = "value"


class Forecast:
    reward = "forecast"

    def __init__(self, name: str, options: dict[str, Any], style: str, split: str, shuffle: bool, seed: int):
        try:
            self.options = ForecastOptions.model_validate(options)
        except ValidationError as err:
            first = err.errors()[0]
            where = ".".join(map(str, ("task.options", *first["loc"])))
            known = ", ".join(ForecastOptions.model_fields)
            raise UserError(f"{where}: {first['msg']}; forecast takes {known}") from err
        if split not in SPLITS:
            raise UserError(f"task.split = '{split}' is not a part of forecast:{name}; it has train and test, by time")
        self.name = f"forecast:{name}"
        self.style = style
        self.series = read_series(name, self.options.day_column, self.options.value_column)
        returns = self.series.returns
        self.returns = returns
        targets = range(self.options.window + 1, len(returns))
        self.first_test = self._first_test()
        parts = {
            "train": [t for t in targets if self.series.days[t] < self.first_test],
            "test": [t for t in targets if self.series.days[t] >= self.first_test],
        }
        if min(map(len, parts.values())) < MIN_SAMPLES:
            raise UserError(
                f"{self.name} has {len(parts['train'])} days to train on and {len(parts['test'])} to test on, from "
                f"{self.first_test} on; each part needs {MIN_SAMPLES}: set task.options.test_from or a smaller window"
            )
        self.targets = parts[split]
        self.climate = Climate(returns[parts["train"]])
        self.order = SampleOrder(len(self.targets), seed, shuffle)

    def __len__(self) -> int:
        return len(self.targets)

    def _first_test(self) -> date:
        if self.options.test_from is not None:
            return self.options.test_from
        return self.series.days[int(len(self.series.days) * (1 - TEST_SHARE))]

    def sample(self, index: int) -> Sample:
        target = self.targets[self.order.at(index)]
        outcome = float(self.returns[target])
        columns = {
            "outcome": outcome,
            "regime": self.climate.regime(outcome),
            "scale": self.climate.scale,
            "day": self.series.days[target].isoformat(),
        }
        return Sample(index, self._prompt(target), columns, f"{self.series.name}, {columns['day']}")

    def _prompt(self, target: int) -> Prompt:
        window = self.returns[target - self.options.window : target]
        shown = " ".join(f"{r:+.{self.options.decimals}f}" for r in window)
        if self.style == "search":
            return f"{shown}\n"
        low, high = (f"{edge:.2f}" for edge in self.climate.edges)
        text = QUESTION.format(name=self.series.name, returns=shown, low=low, high=high)
        return [{"role": "user", "content": text + HOW}] if self.style == "chat" else text + HOW + "\n"


class Climate:
    """What is usual, from the train part: the forecast that knows nothing of the last days."""

    def __init__(self, returns: Floats):
        self.edges = tuple(float(q) for q in np.quantile(np.abs(returns), REGIME_LEVELS))
        self.quantiles = tuple(float(q) for q in np.quantile(returns, LEVELS))
        regimes = [self.regime(float(r)) for r in returns]
        self.regimes = tuple(regimes.count(k) / len(regimes) for k in range(len(REGIMES)))
        self.scale = SCALE * float(returns.std())
        """Of the quantile score."""

    def regime(self, outcome: float) -> int:
        return sum(abs(outcome) > edge for edge in self.edges)


def reward(
    completions: list[Any], outcome: list[float], regime: list[int], scale: list[float], **_: Any
) -> list[float]:
    """1 for knowing the outcome, -1 for the worst forecast and for what is none (see `scores`)."""
    rows = zip(completions, outcome, regime, scale, strict=True)
    found = ((parse_prediction(text_of(completion)), y, k, s) for completion, y, k, s in rows)
    return [WORST if prediction is None else score(prediction, y, k, s) for prediction, y, k, s in found]
