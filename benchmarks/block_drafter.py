"""A block drafter against a chain: acceptance and speed after equally long training on the same completions.

    python benchmarks/block_drafter.py --seconds 60

Trains an EAGLE chain, a block whose draft tokens are told the one before them, and a parallel block, each for so many
seconds of CPU time (one thread; on a GPU, of wall-clock time), beginning with few draft tokens in a row. Prints the
accept length with chains of seven on other prompts, and what a rollout of so many sequences takes with each, over plain
decoding, with the best depth of each kind. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

import torch

from paceline.core import Request, SamplingParams
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.loss import batches, read_sequences, suitable_rate
from paceline.draft.eagle.model import EagleModel
from paceline.draft.eagle.trainer import EagleTrainer, TrainSettings
from paceline.draft.strategy import PLAIN, Strategy
from paceline.library.fit import (
    BLOCK_TOKENS,
    DrafterKind,
    TokenSequence,
    count_accepted,
    drafter_for,
    generate_sequences,
)
from paceline.model import Decoder, load_model
from paceline.model.tokenizer import load_tokenizer
from paceline.rollout.engine import EngineSettings, RolloutEngine
from paceline.setup.device import choose_device
from paceline.tasks.countdown import Countdown

KINDS: tuple[DrafterKind, ...] = ("chain", "block", "parallel")
STEP_TOKENS = 512


def main() -> None:
    args = parse()
    policy = load_model(args.model, device=choose_device("auto"))
    on_gpu = policy.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    sequences = generate_sequences(policy, make_requests(args, args.answers, 0, args.max_tokens))
    rows: list[dict[str, Any]] = []
    for kind in args.kinds:
        drafter = drafter_for(policy, sequences, args.window, None, 0, kind)
        steps = train(drafter, sequences, args.seconds, clock, not args.all_at_once)
        accepted = count_accepted(drafter, make_requests(args, 24, 1_000_003, args.max_tokens))
        row: dict[str, Any] = {"kind": kind, "steps": steps, **accepted}
        del row["by_position"]
        for batch in args.batches:
            row[f"speed_{batch}"], row[f"best_{batch}"] = speed(args, policy, drafter, batch, clock)
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(json.dumps({"device": where, "settings": vars(args), "rows": rows}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--all-at-once", action="store_true", help="train all draft tokens in a row from the beginning")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 7])
    return parser.parse_args()


def make_requests(args: argparse.Namespace, count: int, seed: int, length: int, least: int = 0) -> list[Request]:
    tokenizer = load_tokenizer(args.model)
    task = Countdown("medium", "search", seed=3 + seed)
    sampling = SamplingParams(max_tokens=length, min_tokens=least, stop_token_ids=tokenizer.eos_ids)
    prompts = (tuple(tokenizer.encode_prompt(task.sample(i // 2).prompt)) for i in range(count))
    return [Request(i, prompt, sampling, 1) for i, prompt in enumerate(prompts)]


def train(drafter: EagleModel, sequences: list[TokenSequence], seconds: float, clock: Any, grow: bool) -> int:
    runs = drafter.shape.block or BLOCK_TOKENS
    settings = TrainSettings(lr=suitable_rate(drafter.policy), runs=runs, grow=grow)
    trainer = EagleTrainer(drafter, settings)
    dice = random.Random(0)
    spent = 0.0
    while spent < seconds:
        for batch in batches(sequences, STEP_TOKENS, dice.shuffle, lambda sequence: len(sequence[0])):
            seen = read_sequences(drafter, batch)  # the same for all kinds, so its time is not counted
            started = clock()
            trainer.step(seen, min(1.0, spent / seconds))
            spent += clock() - started
            if spent >= seconds:
                break
    trainer.publish()
    return trainer.steps


def speed(args: argparse.Namespace, policy: Decoder, drafter: EagleModel, batch: int, clock: Any) -> tuple[float, str]:
    """Tokens per second over those of plain decoding with the best depth, and which one that is."""
    requests = make_requests(args, batch, 2_000_003, 96, 96)
    strategies = [PLAIN, *(Strategy.parse(f"neural:{depth}") for depth in args.depths)]
    engines = {}
    for strategy in strategies:
        engine = RolloutEngine(policy, EngineSettings(max_batch=batch), None, [EagleDrafter(drafter)], strategies)
        engine.choose = lambda count, strategy=strategy: strategy  # type: ignore[misc]
        engines[strategy] = engine
    taken = dict.fromkeys(strategies, float("inf"))
    for _ in range(3):  # in turns
        for strategy, engine in engines.items():
            started = clock()
            for _ in engine.run(requests):
                pass
            taken[strategy] = min(taken[strategy], clock() - started)
    best = min(strategies[1:], key=lambda strategy: taken[strategy])
    return round(taken[PLAIN] / taken[best], 3), str(best)


if __name__ == "__main__":
    main()
