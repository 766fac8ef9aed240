"""TRL's GRPOTrainer with its own generation and with Paceline's: seconds per rollout, and are the rewards alike?

    python benchmarks/trl_rollout.py [--seeds 4] [--steps 6] [--difficulty medium] [--tokens 300]

The same script runs with and without the two lines, seed by seed in turns, each time from the same weights over the
same prompts. Every completion is counted and compared with its place in the data. The seconds of a rollout are those of
the trainer's `_generate`, from prompts to completions, whoever writes them; the first step of each run, in which the
engine is made and its tuner knows nothing, counts like the others. Rewards of both engines are compared over all seeds:
at the first step, where the weights are the same, prompt by prompt, and over all steps. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from paceline.integrations.trl import PacelineRollout
from paceline.model.checkpoint import find_model
from paceline.tasks import countdown

LEVEL = 1e-3  # of the tests: a difference as large as this would come about by chance once in a thousand times


@dataclass
class Result:
    """One run of the script."""

    seconds: list[float] = field(default_factory=list)  # per rollout
    tokens: list[int] = field(default_factory=list)
    prompts: list[list[str]] = field(default_factory=list)  # per step
    rewards: list[list[float]] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)


class Timed(GRPOTrainer):
    """Notes how long it takes from prompts to completions."""

    result: Result

    def _generate(self, prompts: list[Any]) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        out = super()._generate(prompts)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.result.seconds.append(time.perf_counter() - started)
        self.result.tokens.append(sum(len(ids) for ids in out[1]))
        return out


def run(args: argparse.Namespace, seed: int, ours: bool, data: Dataset) -> Result:
    result = Result()

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        rows = zip(completions, columns["numbers"], columns["target"], strict=True)
        values = [countdown.reward([text], [numbers], [target])[0] for text, numbers, target in rows]
        result.prompts.append(list(prompts))
        result.rewards.append(values)
        return values

    folder = find_model(args.model)
    rollout = PacelineRollout(args.drafter, share=args.share)
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as output:
        trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=reward,
            train_dataset=data,
            args=GRPOConfig(
                output_dir=output,
                max_steps=args.steps,
                per_device_train_batch_size=args.prompts * args.samples // args.accumulate,
                gradient_accumulation_steps=args.accumulate,
                num_generations=args.samples,
                max_completion_length=args.tokens,
                learning_rate=args.lr,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=not on_gpu,
                bf16=on_gpu,
                gradient_checkpointing=False,
                disable_tqdm=True,
                seed=seed,
                data_seed=seed,
            ),
            **({"rollout_func": rollout, "callbacks": [rollout]} if ours else {}),
        )
        trainer.result = result
        trainer.remove_callback(PrinterCallback)  # what it prints is in the table
        trainer.train()
        result.log = [row for row in trainer.state.log_history if "reward" in row]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--share", type=float)
    parser.add_argument("--difficulty", default="medium")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=300, help="longest answer")
    parser.add_argument("--lr", type=float, default=2e-5)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    problems = countdown.Countdown(args.difficulty, "search", seed=11)
    samples = [problems.sample(i) for i in range(args.prompts * args.steps)]
    data = Dataset.from_list([{"prompt": s.prompt, **s.columns} for s in samples])
    pairs = []
    print(f"{'seed':>4}  {'step':>4}  {'TRL s':>7}  {'ours s':>7}  {'times':>5}  {'reward TRL':>10}  {'ours':>5}")
    for seed in range(args.seeds):
        runs = [run(args, seed, ours, data) for ours in ((False, True) if seed % 2 else (True, False))]
        theirs, ours = runs if seed % 2 else runs[::-1]
        assert theirs.prompts == ours.prompts, "the same prompts, as often, in the same order"
        assert [len(r) for r in theirs.rewards] == [len(r) for r in ours.rewards]
        pairs.append((theirs, ours))
        for step in range(args.steps):
            a, b = theirs.seconds[step], ours.seconds[step]
            means = statistics.mean(theirs.rewards[step]), statistics.mean(ours.rewards[step])
            print(
                f"{seed:>4}  {step + 1:>4}  {a:>7.2f}  {b:>7.2f}  {a / b:>5.2f}  {means[0]:>10.3f}  {means[1]:>5.3f}",
                flush=True,
            )
    print(json.dumps(summary(args, pairs)))


def summary(args: argparse.Namespace, pairs: list[tuple[Result, Result]]) -> dict[str, Any]:
    seconds = [sum(sum(pair[engine].seconds) for pair in pairs) for engine in range(2)]
    tokens = [sum(sum(pair[engine].tokens) for pair in pairs) for engine in range(2)]
    # Rewards rise with the number of tokens only by what is learned, so time per token is what compares.
    per_token = [s / t for s, t in zip(seconds, tokens, strict=True)]
    times = [a / b for pair in pairs for a, b in zip(pair[0].seconds, pair[1].seconds, strict=True)]
    first = [([pair[engine].rewards[0] for pair in pairs]) for engine in range(2)]
    whole = [[statistics.mean(r) for pair in pairs for r in pair[engine].rewards] for engine in range(2)]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {
        "model": args.model,
        "device": name,
        "seeds": args.seeds,
        "steps": args.steps,
        "completions": sum(len(r) for pair in pairs for r in pair[0].rewards),
        "speedup": round(seconds[0] / seconds[1], 2),
        "speedup_per_token": round(per_token[0] / per_token[1], 2),
        "speedup_by_rollout": [round(q, 2) for q in statistics.quantiles(times, n=4)],
        "tokens_per_s": [round(1 / t) for t in per_token],
        "reward": [round(statistics.mean(w), 4) for w in whole],
        "p_first_step": round(same_law(first[0], first[1], args.samples), 4),
        "p_all_steps": round(same_mean(whole[0], whole[1]), 4),
        "level": LEVEL,
        "accept_length": round(statistics.mean(r["paceline/accept_length"] for p in pairs for r in p[1].log), 2),
        "drafter_s": round(sum(r.get("paceline/drafter_seconds", 0.0) for p in pairs for r in p[1].log), 2),
    }


def same_law(a: list[list[float]], b: list[list[float]], samples: int) -> float:
    """p-value of the difference in mean reward where both answered the same prompts equally often: what prompts differ
    in cancels, so only the spread within each prompt's answers counts."""
    difference = variance = 0.0
    for mine, theirs in zip(a, b, strict=True):
        for i in range(0, len(mine), samples):
            groups = mine[i : i + samples], theirs[i : i + samples]
            difference += sum(groups[0]) - sum(groups[1])
            both = [*groups[0], *groups[1]]
            variance += 2 * samples * statistics.pvariance(both) * len(both) / (len(both) - 1)
    return _two_sided(difference, variance)


def same_mean(a: list[float], b: list[float]) -> float:
    """p-value of the difference in mean over steps and seeds, both of which saw the same prompts."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return _two_sided(sum(differences), len(differences) * statistics.variance(differences))


def _two_sided(difference: float, variance: float) -> float:
    return math.erfc(abs(difference) / math.sqrt(2 * variance)) if variance else 1.0


if __name__ == "__main__":
    main()
