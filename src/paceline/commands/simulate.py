"""`paceline simulate RUN`: what the steps of a run would take on other workers, from the costs that it has measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.errors import UserError
from paceline.report.rundata import read_run
from paceline.simulate.gpus import ratios
from paceline.simulate.idle import Coupling
from paceline.simulate.measured import MeasuredRun, measure_run
from paceline.simulate.simulator import STAGES, SimStep, Simulator

TOKENS_PER_FLIP = 1500.0  # of a policy that learns fast (benchmarks/results: 1,580 at a learning rate of 1.2e-4)
MOST_WORKERS = 4096
ASSUMED = (
    "Assumed: every worker has a device like those of the run, to itself; within a batch all sequences go on at the "
    "mean pace; lengths do not depend on who decodes; rounds go with a GPU's bandwidth, updates with its arithmetic."
)


@dataclass(frozen=True)
class SimOptions:
    workers: Sequence[int]
    """Empty: as many as the run had."""
    weak: bool
    """As many requests for each worker as in the run, instead of as many in all."""
    gpu: str | None
    measured_on: str | None
    tokens_per_flip: float | None


def parse_workers(text: str | None) -> list[int]:
    """`1,2,8` -> [1, 2, 8]."""
    if text is None:
        return []
    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= MOST_WORKERS for word in words):
        raise UserError(f"--workers {text} is not a list of numbers from 1 to {MOST_WORKERS}, such as 1,2,8")
    return [int(word) for word in words]


def simulate_command(folder: Path, options: SimOptions, as_json: bool) -> None:
    run = read_run(folder)
    measured = measure_run(run)
    result = simulate_run(measured, options)
    if as_json:
        print(json.dumps(result))
        return
    console = Console(highlight=False)
    console.print(f"{folder}: {len(measured.steps)} steps on {_workers(measured.workers)}", markup=False)
    console.print(_table(result))
    console.print(_sentences(result), markup=False)


def simulate_run(measured: MeasuredRun, options: SimOptions) -> dict[str, Any]:
    """The run as it was, its simulation, and what each technique gives on so many workers, as JSON."""
    costs = measured.costs
    if options.gpu:
        if options.measured_on is None:
            raise UserError("a run does not name its GPU: say with --measured-on on which one it was made")
        costs = costs.on(*ratios(options.measured_on, options.gpu))
    flips = options.tokens_per_flip or measured.tokens_per_flip or TOKENS_PER_FLIP
    limits = (measured.slots, measured.max_tokens)
    as_it_was = Simulator(measured.costs, *limits, Coupling(flips))
    own = as_it_was.run(measured.steps, measured.workers, STAGES["speculation"])
    simulator = Simulator(costs, *limits, Coupling(flips))
    rows = []
    for workers in options.workers or [measured.workers]:
        times = max(1, round(workers / measured.workers)) if options.weak else 1
        steps = [step.times(times) for step in measured.steps]
        found = {stage: simulator.run(steps, workers, techniques) for stage, techniques in STAGES.items()}
        plain_s = found["plain decoding"].step_s
        rows += [
            {"workers": workers, "technique": stage, "times_plain": round(plain_s / step.step_s, 4)} | _rounded(step)
            for stage, step in found.items()
            if workers > 1 or stage in ("plain decoding", "speculation")
        ]
    return {
        "workers": measured.workers,
        "measured": {"step_s": measured.step_s, "rollout_s": measured.rollout_s, "dry": measured.dry},
        "simulated": {"step_s": own.step_s, "rollout_s": own.rollout_s, "dry": own.dry},
        "tokens_per_flip": flips,
        "tokens_per_flip_measured": measured.tokens_per_flip is not None and options.tokens_per_flip is None,
        "rows": rows,
    }


def _rounded(step: SimStep) -> dict[str, float]:
    return {name: round(value, 5) for name, value in asdict(step).items()}


def _table(result: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("workers", "", "step s", "rollout s", "dry", "idle", "times plain"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    own = result["measured"]
    table.add_row(
        str(result["workers"]), "as measured", f"{own['step_s']:.2f}", f"{own['rollout_s']:.2f}", f"{own['dry']:.1%}"
    )
    for row in result["rows"]:
        table.add_row(
            str(row["workers"]),
            row["technique"],
            f"{row['step_s']:.2f}",
            f"{row['rollout_s']:.2f}",
            f"{row['dry']:.1%}",
            f"{row['idle']:.1%}",
            f"{row['times_plain']:.2f}",
        )
    return table


def _sentences(result: dict[str, Any]) -> str:
    own = result["measured"]
    again = result["simulated"]
    source = "as the run measured" if result["tokens_per_flip_measured"] else "assumed, see --tokens-per-flip"
    return (
        f"Simulated as it was: step {again['step_s'] / own['step_s'] - 1:+.1%}, rollout "
        f"{again['rollout_s'] / own['rollout_s'] - 1:+.1%}.\n"
        f"Neighbouring policies write {result['tokens_per_flip']:,.0f} tokens alike ({source}).\n{ASSUMED}"
    )


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
