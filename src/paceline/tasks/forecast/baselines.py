"""What a forecast has to be better than, each knowing the days before only: climatology, a scaled history, GARCH."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from paceline.errors import UserError
from paceline.tasks.forecast.scores import LEVELS, REGIMES, Prediction, quantile_score, ranked_score, score
from paceline.tasks.forecast.series import Floats
from paceline.tasks.forecast.task import Climate, Forecast

DECAY = 0.94  # weight of yesterday's variance in a moving one, as RiskMetrics has it for daily returns


@dataclass(frozen=True)
class BaselineScore:
    """Means over the days of the test part; of both scores lower is better."""

    quantile: float
    ranked: float
    reward: float


def predictions(task: Forecast) -> dict[str, list[Prediction]]:
    """Of each baseline, for the task's targets in their order."""
    climate = task.climate
    usual = Prediction(climate.quantiles, climate.regimes)
    fitted = ~np.isnan(task.returns) & np.array([day < task.first_test for day in task.series.days])
    found = {"climatology": [usual] * len(task.targets)}
    for name, volatility in (("scaled history", moving_volatility(task.returns)), ("GARCH", garch_volatility(task))):
        standard = (task.returns / volatility)[fitted & np.isfinite(volatility)]
        found[name] = [_scaled(standard, float(volatility[target]), climate) for target in task.targets]
    return found


def _scaled(standard: Floats, volatility: float, climate: Climate) -> Prediction:
    """The returns of the train part over their volatility then, times that of the day."""
    scaled = standard * volatility
    beyond = [float(np.mean(np.abs(scaled) > edge)) for edge in climate.edges]
    quantiles = tuple(float(q) for q in np.quantile(scaled, LEVELS))
    edges = (1.0, *beyond, 0.0)
    return Prediction(quantiles, tuple(edges[k] - edges[k + 1] for k in range(len(REGIMES))))


def moving_volatility(returns: Floats) -> Floats:
    """Of each day from the days before it."""
    out = np.full(len(returns), np.nan)
    variance = float(np.nanmean(returns[1:21] ** 2))
    for day in range(21, len(returns)):
        out[day] = np.sqrt(variance)
        variance = DECAY * variance + (1 - DECAY) * float(returns[day]) ** 2
    return out


def garch_volatility(task: Forecast) -> Floats:
    """GARCH(1,1) with Student's t: parameters from the train part, then each day's variance from the days before it."""
    try:
        from arch import arch_model
    except ImportError as err:
        raise UserError("the GARCH baseline needs arch: pip install 'paceline[forecast]'") from err
    returns = task.returns[1:]
    train = sum(day < task.first_test for day in task.series.days[1:])
    model = {"mean": "Constant", "vol": "GARCH", "p": 1, "q": 1, "dist": "t"}
    fitted = arch_model(returns[:train], **model).fit(disp="off", show_warning=False)
    known = arch_model(returns, **model).fix(fitted.params)
    return np.concatenate([[np.nan], np.asarray(known.conditional_volatility)])


def mean_score(task: Forecast, predicted: Sequence[Prediction]) -> BaselineScore:
    scale = task.climate.scale
    outcomes = [float(task.returns[target]) for target in task.targets]
    regimes = [task.climate.regime(outcome) for outcome in outcomes]
    rows = list(zip(predicted, outcomes, regimes, strict=True))
    return BaselineScore(
        fmean(quantile_score(p.quantiles, y, scale) for p, y, _ in rows),
        fmean(ranked_score(p.regimes, k) for p, _, k in rows),
        fmean(score(p, y, k, scale) for p, y, k in rows),
    )


def direction(task: Forecast) -> dict[str, float]:
    """Share of days whose sign is predicted right: always up, like yesterday, against yesterday."""
    up = np.array([task.returns[target] > 0 for target in task.targets])
    before = np.array([task.returns[target - 1] > 0 for target in task.targets])
    same = float(np.mean(up == before))
    return {"always up": float(up.mean()), "like the day before": same, "unlike the day before": 1 - same}
