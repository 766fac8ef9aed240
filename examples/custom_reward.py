"""Reinforcement learning with a reward of one's own: right answers, the sooner the better.

    python examples/custom_reward.py --steps 20

The function gets the columns of the task by name; Countdown has `numbers` and `target`.
"""

from __future__ import annotations

import argparse

from paceline import Trainer
from paceline.tasks import countdown


def right_and_brief(
    completions: list[str], numbers: list[list[int]], target: list[int], **columns: object
) -> list[float]:
    """1 for a right answer, and up to 0.2 more the shorter it is."""
    right = countdown.reward(completions, numbers, target)
    return [value * (1.2 - 0.2 * min(1.0, len(text) / 400)) for value, text in zip(right, completions, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="per step")
    parser.add_argument("--tokens", type=int, default=400, help="longest answer")
    parser.add_argument("--run", default=None, help="the run's directory")
    args = parser.parse_args()
    trainer = Trainer(
        "embedded",
        "countdown",
        right_and_brief,
        steps=args.steps,
        run_dir=args.run,
        settings={
            "task.difficulty": "easy",
            "rollout.prompts": args.prompts,
            "rollout.samples": 4,
            "rollout.max_tokens": args.tokens,
            "learn.lr": 1e-4,
        },
        progress=True,
    )
    done = trainer.train()
    print(f"mean reward: first {done.rewards[0]:.3f}, last {done.rewards[-1]:.3f}; the policy is in {done.checkpoint}")


if __name__ == "__main__":
    main()
