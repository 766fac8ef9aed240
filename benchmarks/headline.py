"""The report's headline against `paceline compare`, on the same rollouts: how far is an estimate that rests on the few
plain rounds of a run from what plain decoding takes?

    python benchmarks/headline.py --repeat 2                     # four short recipes, twice each: a quarter of an hour
    python benchmarks/headline.py --words "steps=5 rollout.prompts=8" --repeat 1

Each is compared with plain decoding in turns, in a process of its own; the report's headline is then read from the
run's own plain rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from paceline.report.rundata import read_run
from paceline.report.wall_clock import measure_wall_clock

WORDS = (
    "steps=6 rollout.prompts=3 rollout.samples=4 rollout.max_tokens=400",
    "steps=6 rollout.prompts=4 rollout.samples=4 rollout.max_tokens=500 cluster.workers=2",
    "steps=5 rollout.prompts=4 rollout.samples=4 rollout.max_tokens=500 seed=3",
    "steps=5 rollout.prompts=8",
)
LIMIT_S = 3600
PARTS = ("rollout", "step")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--words", action="append", help="settings of one comparison; several are possible")
    parser.add_argument("--repeat", type=int, default=1)
    return parser.parse_args(argv)


def measure(recipe: str, words: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="headline-") as folder:
        command = [
            sys.executable,
            "-m",
            "paceline.cli",
            "compare",
            recipe,
            *words.split(),
            f"run_dir={folder}/run",
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        compared = json.loads(done.stdout.splitlines()[-1])
        found = measure_wall_clock(read_run(Path(folder) / "run"))
    if found is None:
        raise SystemExit(f"{words}: the run has no plain rounds")
    return {
        "words": words,
        "plain_rounds": found.plain_rounds,
        "rollout": [round(found.rollout, 3), compared["rollout_speedup"]],
        "rollout_range": compared["rollout_speedup_range"],
        "step": [round(found.step, 3), compared["step_speedup"]],
    }


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    rows = []
    for words in args.words or WORDS:
        for _ in range(args.repeat):
            row = measure(args.recipe, words)
            rows.append(row)
            parts = (f"{part} {row[part][0]:.2f} / {row[part][1]:.2f} {off(row, part):+4.0%}" for part in PARTS)
            print(f"{words:<90} {row['plain_rounds']:>4} plain rounds  {'  '.join(parts)}", flush=True)
    middle = {part: round(median(off(row, part) for row in rows), 3) for part in PARTS}
    print(json.dumps({"rows": rows, "median_error": middle}))


def off(row: dict[str, Any], part: str) -> float:
    estimated, compared = row[part]
    return estimated / compared - 1


if __name__ == "__main__":
    main()
