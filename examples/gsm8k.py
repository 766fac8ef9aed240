"""GSM8K by its configuration, with a chat model: a template makes prompts of its columns, `#### 72` is understood.

    python examples/gsm8k.py                                 # hub:openai/gsm8k:main and Qwen2.5-0.5B-Instruct
    python examples/gsm8k.py --make sums                     # writes a folder of the same shape, and ends
    python examples/gsm8k.py --data sums:socratic --model MODEL --shots 2

The folder has the layout of the hub: two configurations, named in its README.md, with a train and a test split each.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from paceline import Trainer

CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train.jsonl}, {split: test, path: main/test.jsonl}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train.jsonl}, {split: test, path: socratic/test.jsonl}]
---
"""
TEMPLATE = "{question}\nThink step by step, then give the number behind ####."


def make_folder(folder: Path, count: int = 40) -> None:
    """Sums in GSM8K's words: questions, and solutions that end with #### and the number."""
    r = random.Random(0)
    for kind in ("main", "socratic"):
        (folder / kind).mkdir(parents=True)
        for split in ("train", "test"):
            rows = [make_row(kind, r.randint(2, 99), r.randint(2, 99)) for _ in range(count)]
            (folder / kind / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "README.md").write_text(CARD)


def make_row(kind: str, april: int, may: int) -> dict[str, str]:
    total = april + may
    asked = "How many clips did she sell? ** " if kind == "socratic" else ""
    solution = f"{asked}She sold {april}+{may} = <<{april}+{may}={total}>>{total} clips.\n#### {total:,}"
    return {"question": f"Ada sold {april} clips in April and {may} in May. How many in all?", "answer": solution}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path, help="write such a folder, and end")
    parser.add_argument("--data", default="hub:openai/gsm8k:main")
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=16, help="per step")
    parser.add_argument("--tokens", type=int, default=512, help="most tokens of an answer")
    parser.add_argument("--shots", type=int, default=0, help="solved examples before each question")
    parser.add_argument("--run", default="runs/gsm8k")
    args = parser.parse_args()
    if args.make:
        make_folder(args.make)
        print(f"wrote {args.make}; go on with --data {args.make}:main or {args.make}:socratic")
        return
    trainer = Trainer(
        args.model,
        args.data,
        "math",  # reads the right number behind ####, and in the answer also "The answer is 72."
        steps=args.steps,
        run_dir=args.run,
        settings={
            "task.split": "train",
            "task.template": TEMPLATE,
            "task.few_shot": args.shots,
            "rollout.prompts": args.prompts,
            "rollout.samples": 8,
            "rollout.max_tokens": args.tokens,
        },
        progress=True,
    )
    done = trainer.train()
    print(f"{len(done.metrics)} steps, mean reward: first {done.rewards[0]:.3f}, last {done.rewards[-1]:.3f}")


if __name__ == "__main__":
    main()
