"""Which completions to train a drafter on where memory does not hold all of a step, and which part of long ones.

    python benchmarks/spot_buffer.py --share 0.15

Completions of a policy to problems with a long tail are split into steps. Of each step a share of the tokens is kept,
and a drafter that begins untrained makes --updates updates on them. Printed is the expected accept length with chains
of five on problems that were not trained on: over all tokens, and over those far into long completions, which are what
the tail of a rollout is made of. All variants make the same number of updates of the same size. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from paceline.core import Request, SamplingParams
from paceline.draft.eagle.loss import batches, expected_accept_length, read_sequences, suitable_rate
from paceline.draft.eagle.model import EagleModel, new_drafter
from paceline.draft.eagle.trainer import EagleTrainer, TrainSettings
from paceline.library.fit import TokenSequence, generate_sequences
from paceline.model import Decoder, load_model
from paceline.model.tokenizer import load_tokenizer
from paceline.setup.device import choose_device
from paceline.spot.buffer import ANY_LENGTH, SpotBuffer
from paceline.spot.samples import FeatureSample, cut, lay_out
from paceline.tasks.countdown import Countdown

VARIANTS = [
    ("shortest", "beginning"), ("random", "pieces"), ("longest and random", "pieces"), ("longest", "beginning"),
    ("longest", "pieces"), ("buffer, longest only", "pieces"), ("buffer, any length", "pieces"),
]  # fmt: skip
FROM = (0, 200, 500)  # positions in a prompt and its completion, from which on drafters are evaluated
RUNS = 5  # draft tokens in a chain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--answers", type=int, default=576)
    parser.add_argument("--samples", type=int, default=4, help="completions of each problem")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--updates", type=int, default=100, help="of the drafter in each step")
    parser.add_argument("--step-tokens", type=int, default=192, help="of each update")
    parser.add_argument("--share", type=float, default=0.15, help="of a step's tokens that are kept")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--variants", "--ways", type=int, nargs="*", default=range(len(VARIANTS)), help="by number")
    args = parser.parse_args()
    policy = load_model(args.model, device=choose_device("auto"))
    groups = write_groups(args, policy)
    rows = []
    for keep, show in (VARIANTS[i] for i in args.variants):
        started = time.perf_counter()
        each = [train(args, policy, groups, keep, show, seed) for seed in range(args.seeds)]
        means = [round(statistics.fmean(values), 3) for values in zip(*each, strict=True)]
        rows.append({"keeps": keep, "shows": show, "accept_length": means, "by_seed": each})
        shown = "  ".join(f"from {first} on {value:.2f}" for first, value in zip(FROM, means, strict=True))
        print(f"{keep:<21} {show:<10} {shown}  ({time.perf_counter() - started:.0f} s)", flush=True)
    print(json.dumps({"settings": vars(args) | {"variants": list(args.variants)}, "from": FROM, "rows": rows}))


def write_groups(args: argparse.Namespace, policy: Decoder) -> list[list[TokenSequence]]:
    """Completions by problem."""
    tokenizer, task = load_tokenizer(args.model), Countdown("tail", "search", seed=3)
    sampling = SamplingParams(max_tokens=args.max_tokens, stop_token_ids=tokenizer.eos_ids)
    prompts = (tuple(tokenizer.encode_prompt(task.sample(i // args.samples).prompt)) for i in range(args.answers))
    sequences = generate_sequences(policy, [Request(i, prompt, sampling) for i, prompt in enumerate(prompts)])
    groups: dict[tuple[int, ...], list[TokenSequence]] = {}
    for tokens, prompt in sequences:
        groups.setdefault(tuple(tokens[:prompt]), []).append((tokens, prompt))
    lengths = sorted(len(tokens) for tokens, _ in sequences)
    median = lengths[len(lengths) // 2]
    print(f"{len(sequences)} completions of {lengths[0]} to {lengths[-1]} tokens, half of them below {median}")
    return [groups[key] for key in sorted(groups)]


def choose(sequences: Sequence[TokenSequence], capacity: int, keep: str, rng: random.Random) -> list[TokenSequence]:
    """Sequences of at most `capacity` tokens in all."""
    by_length = sorted(sequences, key=lambda sequence: len(sequence[0]))
    if keep == "shortest":  # what is left if sequences come longest first and the oldest are evicted
        return _fill(by_length, capacity)
    if keep == "longest":
        return _fill(by_length[::-1], capacity)
    mixed = list(by_length)
    rng.shuffle(mixed)
    if keep == "random":
        return _fill(mixed, capacity)
    if keep == "longest and random":
        longest = _fill(by_length[::-1], capacity * 3 // 4)
        known = {id(sequence) for sequence in longest}
        return longest + _fill([sequence for sequence in mixed if id(sequence) not in known], capacity // 4)
    buffer = SpotBuffer(4 * capacity, ANY_LENGTH if keep == "buffer, any length" else 0.0)
    entries = [(buffer.reserve(tokens, prompt, 0), sequence) for sequence in mixed for tokens, prompt in [sequence]]
    return [(sequence[0][: len(e)], sequence[1]) for e, sequence in entries if e and not (e.evicted or e.held_out)]


def _fill(sequences: Sequence[TokenSequence], capacity: int) -> list[TokenSequence]:
    kept = []
    for sequence in sequences:
        if len(sequence[0]) <= capacity:
            kept.append(sequence)
            capacity -= len(sequence[0])
    return kept


def show_part(sample: FeatureSample, show: str, size: int, rng: random.Random) -> list[FeatureSample]:
    if show == "pieces" or len(sample) <= size:
        return cut(sample, size, rng)
    return [sample.part(0, max(size, sample.prompt + 1), sample.prompt)]


def train(
    args: argparse.Namespace, policy: Decoder, groups: list[list[TokenSequence]], keep: str, show: str, seed: int
) -> list[float]:
    """Train a drafter on what is kept of each step -> accept length by where it is evaluated."""
    rng, groups = random.Random(seed), list(groups)
    random.Random(seed).shuffle(groups)
    unseen = len(groups) // 4
    evaluated, seen = [sequence for group in groups[:unseen] for sequence in group], groups[unseen:]
    drafter = new_drafter(policy, 128, seed=seed)
    trainer = EagleTrainer(drafter, TrainSettings(lr=suitable_rate(policy), runs=RUNS))
    each = len(seen) // args.steps
    for step in range(args.steps):
        sequences = [sequence for group in seen[step * each : (step + 1) * each] for sequence in group]
        capacity = int(args.share * sum(len(tokens) for tokens, _ in sequences))
        samples = [_sample(drafter, sequence) for sequence in choose(sequences, capacity, keep, rng)]
        left = args.updates
        while left > 0:
            pieces = [piece for sample in samples for piece in show_part(sample, show, args.step_tokens, rng)]
            for pack in list(batches(pieces, args.step_tokens, rng.shuffle, len))[:left]:
                trainer.step(lay_out(pack))
                left -= 1
    trainer.publish()
    return [round(evaluate(drafter, evaluated, first), 3) for first in FROM]


def _sample(drafter: EagleModel, sequence: TokenSequence) -> FeatureSample:
    got = read_sequences(drafter, [sequence])
    return FeatureSample(got.tokens.int(), sequence[1], got.features, got.hidden).on_host()


def evaluate(drafter: EagleModel, sequences: list[TokenSequence], first: int) -> float:
    got: Any = read_sequences(drafter, sequences)
    got.learn &= got.positions >= first
    return expected_accept_length(drafter, got, RUNS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
