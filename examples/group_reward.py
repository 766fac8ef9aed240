"""A reward that compares the answers to a prompt: among the right ones, the shorter the better.

    python examples/group_reward.py --steps 20

A function with TRL's signature gets the whole group of a prompt in one call, once all of it is finished. One that looks
at each answer by itself can ask for them as they are finished, with `@per("completion")`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from paceline import Trainer, per
from paceline.tasks import countdown


def shorter_than_others(
    completions: list[str],
    numbers: list[list[int]],
    target: list[int],
    log_metric: Callable[[str, float], None],
    log_extra: Callable[[str, list], None],
    **columns: object,
) -> list[float]:
    """1 for a right answer, and up to 0.5 more by its place among the right ones of the group."""
    right = countdown.reward(completions, numbers, target)
    order = sorted((len(text), i) for i, text in enumerate(completions) if right[i])
    place = {i: place for place, (_, i) in enumerate(order)}
    log_metric("group/right", sum(right))
    log_extra("place", [place.get(i) for i in range(len(completions))])
    return [
        value + (0.5 * (1 - place[i] / len(order)) if len(order) > 1 and i in place else 0.0)
        for i, value in enumerate(right)
    ]


@per("completion")
def has_answer(completions: list[str], **columns: object) -> list[float]:
    """Compares nothing: it is called for each answer while others are still being written."""
    return [float("<answer>" in text) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--tokens", type=int, default=400, help="longest answer")
    parser.add_argument("--run", default=None, help="the run's directory")
    args = parser.parse_args()
    done = Trainer(
        "embedded",
        "countdown",
        [shorter_than_others, (has_answer, 0.1)],
        steps=args.steps,
        run_dir=args.run,
        settings={
            "task.difficulty": "easy",
            "rollout.prompts": args.prompts,
            "rollout.samples": 6,
            "rollout.max_tokens": args.tokens,
            "learn.lr": 1e-4,
        },
        progress=True,
    ).train()
    first, last = done.metrics[0], done.metrics[-1]
    print(f"right answers in a group of 6: first {first['group/right']:.2f}, last {last['group/right']:.2f}")
    print(f"mean length: first {first['response_length/mean']:.0f}, last {last['response_length/mean']:.0f} tokens")


if __name__ == "__main__":
    main()
