"""Evaluation with pass@4 while a run trains, and two of its checkpoints compared on equal dice.

    python examples/evaluate.py --steps 20

Every evaluation answers the same prompts with the same noise, so what differs between two of them is the policy.
"""

from __future__ import annotations

import argparse

from paceline import Trainer
from paceline.evaluation.paired import compare_scores
from paceline.evaluation.records import read_records
from paceline.run.best import read_best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--prompts", type=int, default=64, help="of an evaluation")
    parser.add_argument("--tokens", type=int, default=400, help="longest answer")
    parser.add_argument("--run", default=None, help="the run's directory")
    args = parser.parse_args()
    done = Trainer(
        "embedded",
        "countdown",
        steps=args.steps,
        run_dir=args.run,
        settings={
            "task.difficulty": "easy",
            "rollout.prompts": 8,
            "rollout.samples": 4,
            "rollout.max_tokens": args.tokens,
            "learn.lr": 1e-4,
            "eval.task": "countdown",
            "eval.task_settings": {"difficulty": "medium"},
            "eval.every": args.every,
            "eval.prompts": args.prompts,
            "eval.samples": 4,
            "eval.greedy": True,
            "eval.best": "pass@4",
        },
        progress=True,
    ).train()

    records = read_records(done.folder)
    for record in records:
        numbers = {name: record.scores.value(name) for name in ("pass@1", "pass@4", "greedy")}
        print(f"step {record.step:>3}:", ", ".join(f"{name} {value:.3f}" for name, value in numbers.items()))
    for name in ("pass@1", "pass@4"):
        d = compare_scores(records[-1].scores, records[0].scores, name)
        print(
            f"{name}, last minus first: {d.difference:+.3f} ± {d.se:.3f}, 95 % interval {d.low:+.3f} to {d.high:+.3f}; "
            f"evaluated apart it would be ± {d.se_unpaired:.3f}"
        )
    best = read_best(done.folder)
    assert best is not None, "a run that was evaluated has a best checkpoint"
    print(f"the best by {best.metric} is step {best.step}: {best.checkpoint or 'the model that the run began with'}")


if __name__ == "__main__":
    main()
