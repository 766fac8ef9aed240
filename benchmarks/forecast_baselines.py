"""What can be forecast of a daily series, and what cannot: baselines on days after those that they were fitted on.

    python benchmarks/forecast_baselines.py                        # S&P 500, NASDAQ and WTI; needs paceline[forecast]
    python benchmarks/forecast_baselines.py --series prices.csv

Scores are those that `task.name=forecast:SERIES` rewards (docs/forecasting.md). Skill is the share of what climatology
lacks to the best reward, 1, that a forecast gains on the same days. The sign of tomorrow's return is beside them. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from typing import Any

from paceline.tasks.forecast import Forecast
from paceline.tasks.forecast.baselines import direction, mean_score, predictions


def measure(series: str, test_from: str | None) -> dict[str, Any]:
    options = {} if test_from is None else {"test_from": test_from}
    task = Forecast(series, options, "text", "test", shuffle=False, seed=0)
    days = task.series.days
    print(f"{series}: {days[0]} to {days[-1]}, {len(task)} days tested from {task.first_test} on")
    rows: dict[str, dict[str, float]] = {}
    for name, predicted in predictions(task).items():
        found = mean_score(task, predicted)
        rows[name] = {key: round(value, 5) for key, value in asdict(found).items()}
        skill = 1 - (1 - found.reward) / (1 - rows["climatology"]["reward"])
        rows[name]["skill"] = round(skill, 4)
        print(
            f"  {name:<18} quantiles {found.quantile:.3f}   regimes {found.ranked:.4f}   reward {found.reward:.4f}"
            f"   skill {skill:+.1%}"
        )
    signs = {name: round(share, 4) for name, share in direction(task).items()}
    error = math.sqrt(0.25 / len(task))
    said = ", ".join(f"{name} {share:.1%}" for name, share in signs.items())
    print(f"  direction          {said} (chance: 50 % ± {error:.1%})")
    return {"series": series, "days": len(task), "test_from": str(task.first_test), "scores": rows, "direction": signs}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", default="sp500,nasdaq,wti")
    parser.add_argument("--test-from", help="a day, as 2014-01-01")
    args = parser.parse_args(argv)
    result = {"series": [measure(name, args.test_from) for name in args.series.split(",")]}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
