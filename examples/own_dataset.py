"""Reinforcement learning on rows of one's own, and going on with the run later.

    python examples/own_dataset.py --steps 10 --run runs/own
    python examples/own_dataset.py --resume --run runs/own

Rows are dicts with a prompt; rewards get their other columns by name. A list, a data set of the datasets library or the
name of a .jsonl or .parquet file will do.
"""

from __future__ import annotations

import argparse
import random
import re

from paceline import Trainer


def make_rows(count: int) -> list[dict]:
    """Sums of three numbers, in the one format of questions that the embedded model knows."""
    r = random.Random(0)
    triples = [sorted(r.sample(range(1, 30), 3)) for _ in range(count)]
    return [{"prompt": f"Make {sum(t)} from {' '.join(map(str, t))}.\n", "total": sum(t)} for t in triples]


def reaches(completions: list[str], total: list[int], **columns: object) -> list[float]:
    """1 if the last equation of the thinking has the total on its right side."""
    found = [re.findall(r"=(\d+)!", text) for text in completions]
    return [float(bool(values) and int(values[-1]) == wanted) for values, wanted in zip(found, total, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--run", default="runs/own-dataset")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    rows = make_rows(64)
    if args.resume:
        trainer = Trainer.resume(args.run, rows, reaches, progress=True)
    else:
        trainer = Trainer(
            "embedded",
            rows,
            [(reaches, 1.0)],
            steps=args.steps,
            run_dir=args.run,
            settings={
                "rollout.prompts": args.prompts,
                "rollout.samples": 4,
                "rollout.max_tokens": 80,
                "learn.lr": 1e-4,
                "checkpoint.every": 1,
            },
            progress=True,
        )
    done = trainer.train()
    print(f"{len(done.metrics)} steps, mean reward: first {done.rewards[0]:.3f}, last {done.rewards[-1]:.3f}")


if __name__ == "__main__":
    main()
