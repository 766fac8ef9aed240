"""Training a drafter on packed completions against the same completions padded to the longest of their batch.

    python benchmarks/packing.py --answers 128 --per-batch 4,8,16

The model answers Countdown problems, so lengths have the tail that they have in a run. Both layouts take the same
completions in the same batches: end to end in one row, or each padded to the longest. They alternate, --repeat
times over all batches; figures are medians of useful tokens/s, those of prompts and completions and not of padding. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from paceline.config import load_config
from paceline.core import Request
from paceline.draft.eagle.files import find_drafter, load_drafter
from paceline.draft.eagle.loss import PackedSequences, read_sequences, suitable_rate
from paceline.draft.eagle.model import NEW_WINDOW, EagleModel, new_drafter
from paceline.draft.eagle.trainer import EagleTrainer, TrainSettings
from paceline.model import load_model
from paceline.model.tokenizer import load_tokenizer
from paceline.rollout import RolloutEngine
from paceline.setup.build import engine_settings, make_sampling
from paceline.setup.device import choose_device
from paceline.spot.samples import FeatureSample, lay_out
from paceline.tasks import make_task
from paceline.tasks.tasks import choose_style

UNSEEN = 3_000_017  # added to the seed for the prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--answers", type=int, default=128)
    parser.add_argument("--per-batch", default="4,8,16")
    parser.add_argument("--runs", type=int, default=5, help="draft tokens in a row that are trained")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    device = choose_device("auto")
    policy = load_model(args.model, device=device)
    folder = find_drafter("auto", args.model)
    drafter = load_drafter(folder, policy) if folder else new_drafter(policy, NEW_WINDOW, 0)
    samples = make_samples(args, drafter)
    lengths = [len(s) for s in samples]
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
    print(f"{len(samples)} answers with their prompts: tokens p50 {p50:.0f}, p90 {p90:.0f}, p99 {p99:.0f}, "
          f"max {max(lengths)}, together {sum(lengths):,}")  # fmt: skip
    print(f"{'answers':>7}  {'positions':>9}  {'packed':>8}  {'padded':>8}  {'ratio':>6}  range")
    print(f"{'a batch':>7}  {'padded':>9}  {'tokens/s':>8}  {'tokens/s':>8}")
    rows = []
    for size in map(int, args.per_batch.split(",")):
        row = measure(args, drafter, [samples[i : i + size] for i in range(0, len(samples), size)])
        rows.append({"per_batch": size} | row)
        low, high = row["ratio_range"]
        print(f"{size:>7}  {row['positions']:>9,}  {row['packed_tok_s']:>8,.0f}  {row['padded_tok_s']:>8,.0f}  "
              f"{row['ratio']:>6.2f}  {low:.2f} to {high:.2f}", flush=True)  # fmt: skip
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(json.dumps({"model": args.model, "device": name, "answers": len(samples), "tokens": sum(lengths),
                      "runs": args.runs, "repeat": args.repeat, "rows": rows}))  # fmt: skip


def make_samples(args: argparse.Namespace, drafter: EagleModel) -> list[FeatureSample]:
    """Completions of the policy to the default task with its features, in random order."""
    config, policy, tokenizer = load_config(), drafter.policy, load_tokenizer(args.model)
    style = choose_style(config.task.style, policy.config.hf, bool(tokenizer.hf.chat_template))
    task = make_task(config.task.model_copy(update={"problems": None}), config.seed + UNSEEN, style)
    sampling = make_sampling(config, tokenizer.eos_ids)
    engine = RolloutEngine(policy, engine_settings(config, policy.device), tokenizer.decode)
    prompts = [tuple(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(args.answers)]
    samples = []
    for done in engine.run(Request(i, prompt, sampling) for i, prompt in enumerate(prompts)):
        prompt = len(done.request.prompt)
        sequence = read_sequences(drafter, [([*done.request.prompt, *done.tokens], prompt)])
        samples.append(FeatureSample(sequence.tokens.int(), prompt, sequence.features, sequence.hidden).on_host())
    random.Random(0).shuffle(samples)  # they come in the order in which they finish, the short ones first
    return samples


def measure(args: argparse.Namespace, drafter: EagleModel, batches: list[list[FeatureSample]]) -> dict[str, Any]:
    trainer = EagleTrainer(drafter, TrainSettings(lr=suitable_rate(drafter.policy), runs=args.runs))
    layouts = {"packed": lay_out, "padded": padded_sequences}
    speeds: dict[str, list[float]] = {name: [] for name in layouts}
    useful = sum(len(s) for batch in batches for s in batch)
    for layout in layouts.values():
        seconds(trainer, batches[:1], layout)  # kernels and memory
    for turn in range(args.repeat):
        for name in list(layouts)[:: 1 if turn % 2 else -1]:
            speeds[name].append(useful / seconds(trainer, batches, layouts[name]))
    ratios = [a / b for a, b in zip(speeds["packed"], speeds["padded"], strict=True)]
    return {
        "positions": sum(len(batch) * max(map(len, batch)) for batch in batches),
        "packed_tok_s": round(statistics.median(speeds["packed"]), 1),
        "padded_tok_s": round(statistics.median(speeds["padded"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def seconds(
    trainer: EagleTrainer,
    batches: list[list[FeatureSample]],
    layout: Callable[[list[FeatureSample]], PackedSequences],
) -> float:
    """One training step on each batch. A step reads its loss, so it is over when it returns."""
    started = time.perf_counter()
    for batch in batches:
        trainer.step(layout(batch))
    return time.perf_counter() - started


def padded_sequences(samples: list[FeatureSample]) -> PackedSequences:
    """Every sample as long as the longest. Nothing is learned from padding, so the loss is that of packed samples."""
    longest = max(map(len, samples))
    padded = [
        FeatureSample(
            F.pad(s.tokens, (0, longest - len(s))),
            s.prompt,
            F.pad(s.features, (0, 0, 0, longest - len(s))),
            F.pad(s.hidden, (0, 0, 0, longest - len(s))),
        )
        for s in samples
    ]
    sequences = lay_out(padded)
    sequences.learn &= torch.cat([torch.arange(longest) + 1 < len(s) for s in samples])
    return sequences


if __name__ == "__main__":
    main()
