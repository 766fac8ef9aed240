"""What helps a drafter to learn quickly: training settings for a new one, with the same work, on the same completions.

    python benchmarks/draft_training.py --model embedded --tokens 300000

Work is counted in tokens times depth / 5, where depth is the number of draft tokens in a row that are trained. Printed
is the expected accept length on held-out completions, with chains of seven, after each quarter of the work. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core import Request, SamplingParams
from paceline.draft.eagle.loss import batches, expected_accept_length, read_sequences, suitable_rate
from paceline.draft.eagle.model import DrafterShape, EagleModel, new_drafter
from paceline.draft.eagle.trainer import EagleTrainer, TrainSettings
from paceline.library.fit import DEPTH, TokenSequence, generate_sequences
from paceline.model import Decoder, load_model
from paceline.model.tokenizer import load_tokenizer
from paceline.setup.device import choose_device
from paceline.tasks.countdown import Countdown

RUNS = 5


@dataclass(frozen=True)
class Variant:
    """How a drafter is trained."""

    step_tokens: int
    first_runs: int | None = None
    from_last_layer: bool = False
    """Whether it begins with weights of the policy's last layer."""

    def __str__(self) -> str:
        first = f", {self.first_runs} draft tokens at first" if self.first_runs else ""
        return f"steps of {self.step_tokens} tokens{first}{', from the last layer' if self.from_last_layer else ''}"


VARIANTS = [
    Variant(2048), Variant(512), Variant(512, from_last_layer=True), Variant(512, 2), Variant(512, 2, True),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--tokens", type=float, default=300_000)
    parser.add_argument("--answers", type=int, default=700)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--difficulty", default="easy")
    parser.add_argument("--window", type=int, default=128)
    args = parser.parse_args()
    policy = load_model(args.model, device=choose_device("auto"))
    sequences = make_sequences(args, policy)
    rows = []
    for variant in VARIANTS:
        rows.append({"variant": str(variant)} | train(args, policy, sequences, variant))
        r = rows[-1]
        shown = " ".join(f"{n:.2f}" for n in r["accept_length"])
        print(f"{r['variant']:<60} {r['steps']:>5} steps {r['seconds']:>6.0f} s  accept length {shown}", flush=True)
    where = torch.cuda.get_device_name() if policy.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(json.dumps({"device": where, "settings": vars(args), "rows": rows}))


def make_sequences(args: argparse.Namespace, policy: Decoder) -> list[TokenSequence]:
    tokenizer, task = load_tokenizer(args.model), Countdown(args.difficulty, "search", seed=3)
    sampling = SamplingParams(max_tokens=args.max_tokens, stop_token_ids=tokenizer.eos_ids)
    prompts = (tuple(tokenizer.encode_prompt(task.sample(i // 2).prompt)) for i in range(args.answers))
    return generate_sequences(policy, [Request(i, prompt, sampling) for i, prompt in enumerate(prompts)])


def train(
    args: argparse.Namespace, policy: Decoder, sequences: list[TokenSequence], variant: Variant
) -> dict[str, Any]:
    drafter = new_drafter(policy, args.window, seed=0)
    if not variant.from_last_layer:
        drafter = EagleModel(policy, DrafterShape(policy.config.intermediate_size, args.window)).init_weights(0)
    held_out = len(sequences) // 12
    evaluated = read_sequences(drafter, sequences[:held_out])
    settings = TrainSettings(lr=suitable_rate(policy), first_runs=variant.first_runs)
    trainer, dice, work = EagleTrainer(drafter, settings), random.Random(0), 0.0
    reached: list[float] = []
    started = time.perf_counter()
    while work < args.tokens:
        for batch in batches(
            sequences[held_out:], variant.step_tokens, dice.shuffle, lambda sequence: len(sequence[0])
        ):
            _, agree = trainer.step(read_sequences(drafter, batch), work / args.tokens)
            work += sum(len(tokens) for tokens, _ in batch) * len(agree) / RUNS
            if work > args.tokens * (len(reached) + 1) / 4:
                trainer.publish()
                reached.append(round(expected_accept_length(drafter, evaluated, DEPTH), 3))
            if work >= args.tokens:
                break
    return {"steps": trainer.steps, "seconds": time.perf_counter() - started, "accept_length": reached}


if __name__ == "__main__":
    main()
