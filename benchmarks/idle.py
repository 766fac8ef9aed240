"""What idle workers are worth: whole steps of two runs, one with writing ahead and one without, in turns.

    python benchmarks/idle.py --steps 12                          # the recipe countdown-tail, two workers
    python benchmarks/idle.py --recipe default --set steps=21

Both runs have the same seed, prompts and noise, and make each step one after the other, whoever was second being first
the next time; the workers of the one that waits do nothing. Prints the seconds of every pair and their ratio, and how
many completions are the same; differences are near-ties of rounding, which float64 (`--set model.dtype=float64`) does
not have. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from in_turns import count_same, make_loop, step_in_turn

ARMS = {"without": "rollout.write_ahead=false", "with": "rollout.write_ahead=true"}


def main() -> None:
    args = parse()
    loops = {
        arm: make_loop(args.recipe, args.out / arm, args.steps + 1, args.workers, [*args.set, setting])
        for arm, setting in ARMS.items()
    }
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    same = 0
    total = 0
    try:
        for step in range(args.steps):
            for arm, row in step_in_turn(loops, step).items():
                rows[arm].append(row)
            same += count_same(loops["without"], loops["with"])
            total += len(loops["without"].last)
            print(line(step + 1, rows["without"][-1], rows["with"][-1]), flush=True)
    finally:
        for loop in loops.values():
            loop.close()
    result = summary(rows, args.skip) | {"identical": same, "responses": total}
    print(json.dumps({"settings": {k: v for k, v in vars(args).items() if k != "out"}, **result}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="countdown-tail")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--skip", type=int, default=2, help="first steps that are not counted: nothing is written yet")
    parser.add_argument("--set", nargs="*", default=[], help="settings as key=value")
    parser.add_argument("--out", type=Path, default=Path("runs/idle"))
    return parser.parse_args()


def line(step: int, without: dict[str, float], ahead: dict[str, float]) -> str:
    a, b = without["timing_s/step"], ahead["timing_s/step"]
    text = f"step {step}: {a:.2f} s without, {b:.2f} s with, {a / b:.2f} times as fast"
    if "ahead/accepted_share" in ahead:
        text += f"; {ahead['ahead/verified_tokens']:.0f} tokens written ahead, {ahead['ahead/accepted_share']:.1%} kept"
    return text


def summary(rows: dict[str, list[dict[str, float]]], skip: int) -> dict[str, object]:
    pairs = list(zip(rows["without"], rows["with"], strict=True))[skip:]
    ratio = lambda name: sorted(a[name] / b[name] for a, b in pairs)  # noqa: E731
    steps = ratio("timing_s/step")
    mean = lambda arm, name: sum(row.get(name, 0.0) for row in rows[arm][skip:]) / max(1, len(pairs))  # noqa: E731
    total = lambda arm: sum(row["timing_s/step"] for row in rows[arm][skip:])  # noqa: E731
    names = ("cluster/idle_s", "cluster/training_s", "cluster/ahead_s", "ahead/verified_tokens", "timing_s/gen")
    return {
        "steps": len(pairs),
        "step_ratio": round(median(steps), 3),
        "step_ratio_range": [round(steps[0], 3), round(steps[-1], 3)],
        "step_ratio_total": round(total("without") / total("with"), 3),
        "rollout_ratio": round(median(ratio("timing_s/gen")), 3),
        "p99_over_p50": round(median(a["response_length/p99"] / a["response_length/p50"] for a, _ in pairs), 2),
        "accepted_share": round(mean("with", "ahead/accepted_share"), 4),
        "tokens_per_flip": round(median(b.get("ahead/tokens_per_flip", 0.0) for _, b in pairs), 1),
        "means": {arm: {name: round(mean(arm, name), 3) for name in names} for arm in rows},
    }


if __name__ == "__main__":
    main()
