"""The simulator against real runs with 1, 2 and 4 workers: step time and the share of time without anything to decode.

    python benchmarks/simulate_runs.py                       # the default recipe on this machine's cores, minutes
    python benchmarks/simulate_runs.py --set model.device=cuda --workers 1,2,4   # on a GPU, under NVIDIA MPS

Each run is simulated from its own costs with as many workers as it had: its workers share one machine, so what a round
costs differs from run to run, and one run's costs say nothing about another's. The first step of each is left out. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from paceline.commands.simulate import SimOptions, simulate_run
from paceline.config import load_config
from paceline.loop import train
from paceline.report.rundata import read_run
from paceline.simulate.measured import measure_run


def measure(workers: int, steps: int, recipe: str | None, settings: list[str], folder: Path) -> dict[str, Any]:
    words = [f"steps={steps}", f"cluster.workers={workers}", f"run_dir={folder / str(workers)}", *settings]
    run, _ = train(load_config(recipe, words))
    found = simulate_run(measure_run(read_run(run.folder)), SimOptions((), False, None, None, None))
    row = {"workers": workers, "measured": found["measured"], "simulated": found["simulated"]}
    step, rollout = (found["simulated"][key] / found["measured"][key] - 1 for key in ("step_s", "rollout_s"))
    return row | {"step_off": round(step, 4), "rollout_off": round(rollout, 4)}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--recipe", help="a .yaml file or a name; the embedded reasoner by default")
    parser.add_argument("--set", action="append", default=[], help="settings, as key=value")
    args = parser.parse_args(argv)
    rows = []
    print(
        "workers   step s: measured simulated   off   rollout off   nothing to decode: measured simulated", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        for workers in map(int, args.workers.split(",")):
            row = measure(workers, args.steps, args.recipe, args.set, Path(folder))
            rows.append(row)
            real, again = row["measured"], row["simulated"]
            print(
                f"{workers:>7}{real['step_s']:>19.2f}{again['step_s']:>10.2f}{row['step_off']:>6.1%}"
                f"{row['rollout_off']:>14.1%}{real['dry']:>29.1%}{again['dry']:>10.1%}",
                flush=True,
            )
    result = {"steps": args.steps, "recipe": args.recipe, "set": args.set, "rows": rows}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
