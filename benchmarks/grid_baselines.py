"""What simple ways of screening are worth on test states of the grid tasks: what a policy has to beat.

    python benchmarks/grid_baselines.py

`none` names no outage. `heavy` names the lines that carry more than a share of their limit, with one severity for all;
both numbers are those that are best on train states. `flows` computes the three heaviest candidates and names those of
them that break a limit, as a policy with three power flows can. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Mapping
from statistics import fmean

from paceline.core import Sample
from paceline.tasks.grid import Grid
from paceline.tasks.grid.scenario import Scenario
from paceline.tasks.grid.scores import score
from paceline.tasks.grid.task import LEVELS

State = tuple[Scenario, Mapping[str, float], Mapping[str, float]]
"""With the loadings before anything goes, and the severity of each candidate."""
FLOWS = 3
SHARES = range(20, 100, 5)
SEVERITIES = range(105, 180, 10)


def states(difficulty: str, split: str, count: int) -> list[State]:
    task = Grid("screening", {}, difficulty, "chat", split, seed=0)
    samples: list[Sample] = [task.sample(i) for i in range(count)]
    found = [Scenario.of(sample.columns) for sample in samples]
    return [(one, one.base(), one.truth()) for one in found]


def mean(some: list[State], say: Callable[[State], dict[str, float]]) -> float:
    return fmean(score(say(state), state[2]) for state in some)


def heavy(share: float, severity: float) -> Callable[[State], dict[str, float]]:
    return lambda state: {name: severity for name in state[0].candidates if state[1][name] > share}


def with_flows(state: State) -> dict[str, float]:
    scenario, loadings, truth = state
    asked = sorted(scenario.candidates, key=lambda name: -loadings[name])[:FLOWS]
    return {name: truth[name] for name in asked if truth[name] > 100}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=200, help="of each part")
    count = parser.parse_args().states
    results = {}
    for difficulty in LEVELS:
        train, test = states(difficulty, "train", count), states(difficulty, "test", count)
        best = max(itertools.product(SHARES, SEVERITIES), key=lambda pair: mean(train, heavy(*pair)))
        breaking = fmean(severity > 100 for state in test for severity in state[2].values())
        empty = fmean(max(state[2].values()) <= 100 for state in test)
        row = {
            "breaking": breaking,
            "nothing breaks": empty,
            "none": mean(test, lambda state: {}),
            "heavy": mean(test, heavy(*best)),
            "flows": mean(test, with_flows),
        }
        results[difficulty] = {name: round(value, 3) for name, value in row.items()}
        print(f"{difficulty:8}", "  ".join(f"{name} {value:.3f}" for name, value in row.items()), f"heavy: {best}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
