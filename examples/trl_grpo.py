"""GRPO with TRL's trainer and Paceline's rollout; `--without` runs the same script without Paceline.

    pip install 'paceline[trl]'
    python examples/trl_grpo.py --steps 20
    python examples/trl_grpo.py --steps 40 --resume

It ends with a line per step: reward, seconds, and how fast the answers were written.
"""

from __future__ import annotations

import argparse
import os

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from paceline.integrations.trl import PacelineRollout  # the first of the two lines
from paceline.model.checkpoint import find_model
from paceline.tasks import countdown


def reward(completions: list[str], numbers: list[list[int]], target: list[int], **_: object) -> list[float]:
    """1 where the expression uses each number once and reaches the target."""
    rows = zip(completions, numbers, target, strict=True)
    return [countdown.reward([text], [given], [wanted])[0] for text, given, wanted in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="a folder, a hub id, or the model that ships with Paceline")
    parser.add_argument("--output", default="runs/trl-grpo")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=300, help="longest answer")
    parser.add_argument("--batch", type=int, default=32, help="answers per step")
    parser.add_argument("--without", action="store_true", help="TRL's own generation")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    args = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

    folder = find_model(args.model)
    problems = countdown.Countdown("easy", "search", seed=0)
    samples = [problems.sample(i) for i in range(256)]
    on_gpu = torch.cuda.is_available()
    rollout = PacelineRollout()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": s.prompt, **s.columns} for s in samples]),
        args=GRPOConfig(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            num_generations=4,
            max_completion_length=args.tokens,
            learning_rate=5e-5,
            logging_steps=1,
            save_steps=max(1, args.steps // 2),
            report_to=[],
            use_cpu=not on_gpu,
            bf16=on_gpu,
            gradient_checkpointing=False,
        ),
        **({} if args.without else {"rollout_func": rollout, "callbacks": [rollout]}),  # the second
    )
    trainer.train(resume_from_checkpoint=args.resume)
    for row in trainer.state.log_history:
        if "reward" in row:
            speed = row.get("paceline/tokens_per_s")
            how = f"{speed:,.0f} tokens/s, accept length {row['paceline/accept_length']:.2f}" if speed else ""
            print(f"step {row['step']}  reward {row['reward']:.3f}  {row['step_time']:.2f} s  {how}")


if __name__ == "__main__":
    main()
