"""Callbacks: numbers of one's own in every step's metrics, and a run that ends early once it is good enough.

    python examples/callbacks.py --steps 20 --enough 0.6

Each is called after every step with its `StepInfo`: the metrics, the groups that were learned from, `log` and `stop`.
"""

from __future__ import annotations

import argparse
from collections import deque

from paceline import StepInfo, Trainer


def count_words(info: StepInfo) -> None:
    """A metric of one's own: it stands in metrics.jsonl, and goes to TensorBoard, W&B or trackio with the others."""
    texts = [text for group in info.groups for text in group.texts.values()]
    info.log("answers/words", sum(len(text.split()) for text in texts) / len(texts))


class Enough:
    """Ends the run when the mean reward of the last steps is high enough."""

    def __init__(self, reward: float, steps: int = 3):
        self.reward = reward
        self.last: deque[float] = deque(maxlen=steps)

    def __call__(self, info: StepInfo) -> None:
        self.last.append(info.metrics["critic/rewards/mean"])
        mean = sum(self.last) / len(self.last)
        if len(self.last) == self.last.maxlen and mean >= self.reward:
            info.stop(f"the mean reward of {len(self.last)} steps is {mean:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--enough", type=float, default=0.6, help="mean reward at which the run ends")
    parser.add_argument("--tokens", type=int, default=400, help="longest answer")
    parser.add_argument("--run", default=None, help="the run's directory")
    args = parser.parse_args()
    settings = {"task.difficulty": "easy", "rollout.samples": 4, "rollout.prompts": 8, "cluster.workers": 1}
    trainer = Trainer(
        steps=args.steps,
        run_dir=args.run,
        settings=settings | {"rollout.max_tokens": args.tokens},
        callbacks=[count_words, Enough(args.enough)],
        progress=True,
    )
    done = trainer.train()
    print(f"{len(done.metrics)} steps; words per answer: {done.metrics[-1]['answers/words']:.1f}; {done.report()}")


if __name__ == "__main__":
    main()
