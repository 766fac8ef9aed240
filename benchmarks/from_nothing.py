"""A drafter from nothing: a whole run that begins with an untrained one, its training included, against plain decoding.

    python benchmarks/from_nothing.py --steps 30                       # the recipe default, two workers
    python benchmarks/from_nothing.py --arms plain invest idle warm

All arms have the same seed, prompts and noise and make each step one after the other, in an order that turns; the
workers of those that wait do nothing. `plain` never speculates; `invest` begins with an untrained drafter and trains it
beyond idle time where that is expected to pay back within the run; `idle` trains it in idle time only; `warm` has the
drafter that lies beside the model. Prints every step's seconds and accept length, and plain decoding's seconds so far
over those of each arm; completions that are not the same are near-ties of rounding. The last line is JSON.

Where others use the machine too, `--cpu-time --workers 1` counts the CPU time of the process everywhere instead of the
clock's, in what the run itself measures and decides by too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import accumulate
from pathlib import Path

if "--cpu-time" in sys.argv:  # before anybody keeps a reference to the other one
    time.perf_counter = time.process_time

from in_turns import count_same, make_loop, step_in_turn

ARMS = {
    "plain": ["speculation.mode=plain"],
    "invest": ["speculation.drafter=new", "spot.invest=true"],
    "idle": ["speculation.drafter=new"],
    "warm": [],
}
DRAFTING = ("timing_s/train_drafter", "timing_s/merge_drafter")

Rows = list[dict[str, float]]


def main() -> None:
    args = parse()
    loops = {
        arm: make_loop(args.recipe, args.out / arm, args.steps, args.workers, [*args.set, *ARMS[arm]])
        for arm in args.arms
    }
    rows: dict[str, Rows] = {arm: [] for arm in args.arms}
    same = dict.fromkeys(args.arms, 0)
    total = 0
    try:
        for step in range(args.steps):
            for arm, row in step_in_turn(loops, step).items():
                rows[arm].append(row)
            base = loops[args.arms[0]]
            total += len(base.last)
            for arm in args.arms:
                same[arm] += count_same(base, loops[arm])
            print(line(step + 1, rows), flush=True)
    finally:
        for loop in loops.values():
            loop.close()
    identical = {arm: f"{count} of {total}" for arm, count in same.items()}
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    print(json.dumps({"settings": settings, "identical": identical, "arms": summary(rows)}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["plain", "invest"])
    parser.add_argument("--set", nargs="*", default=[], help="settings as key=value")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/from-nothing"))
    return parser.parse_args()


def so_far(rows: Rows, *names: str) -> list[float]:
    """Seconds up to each step."""
    return list(accumulate(sum(row.get(name, 0.0) for name in names) for row in rows))


def line(step: int, rows: dict[str, Rows]) -> str:
    base = so_far(next(iter(rows.values())), "timing_s/step")[-1]
    parts = []
    for arm, steps in rows.items():
        last = steps[-1]
        part = f"{arm} {last['timing_s/step']:.1f} s (rollout {last['timing_s/gen']:.1f}"
        if "drafter/version" in last:
            part += f", drafter {sum(last.get(name, 0.0) for name in DRAFTING):.1f}"
        if last["rollout/spec_rounds"]:
            part += f", accept length {last['rollout/spec_accept_length']:.2f}"
        parts.append(part + f"), {base / so_far(steps, 'timing_s/step')[-1]:.2f} times as fast so far")
    return f"step {step:>2}: " + "; ".join(parts)


def summary(rows: dict[str, Rows]) -> dict[str, object]:
    """Of each arm: seconds in all, by part, and how they compare with those of the first one; accept length by step."""
    first = next(iter(rows.values()))
    base = so_far(first, "timing_s/step")
    base_gen = so_far(first, "timing_s/gen")
    arms: dict[str, object] = {}
    for arm, steps in rows.items():
        seconds = so_far(steps, "timing_s/step")
        ratios = [round(a / b, 3) for a, b in zip(base, seconds, strict=True)]
        faster = [i + 1 for i in range(len(ratios)) if min(ratios[i:]) > 1]
        arms[arm] = {
            "seconds": round(seconds[-1], 1),
            "rollout_s": round(so_far(steps, "timing_s/gen")[-1], 1),
            "drafter_s": round(so_far(steps, *DRAFTING)[-1], 1),
            "invested_s": round(so_far(steps, "drafter/invested_s")[-1], 1),
            "idle_training_s": round(so_far(steps, "cluster/training_s")[-1], 1),
            "run_speedup": ratios[-1],
            "rollout_speedup": round(base_gen[-1] / so_far(steps, "timing_s/gen")[-1], 3),
            "faster_from_step": faster[0] if faster else None,
            "speedup_so_far": ratios,
            "accept_length": [round(row["rollout/spec_accept_length"], 2) for row in steps],
            "step_s": [round(row["timing_s/step"], 2) for row in steps],
        }
    return arms


if __name__ == "__main__":
    main()
