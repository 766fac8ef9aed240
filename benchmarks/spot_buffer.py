"""Which answers a drafter should learn from where memory does not hold all of a step, and which part of long ones.

    python benchmarks/spot_buffer.py --share 0.15

Answers of a policy to problems with a long tail are dealt into steps. Of each step a share of the tokens is kept, and a
drafter that begins untrained makes so many updates on them. What comes out is the accept length to be expected with
chains of five on problems that were not trained on: over all tokens, and over those far into long answers, which are
what the tail of a rollout is made of. All ways make the same number of updates of the same size. The last line is JSON.
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
from paceline.draft.eagle.trainer import DrafterTrainer, TrainSettings
from paceline.library.fit import TokenSequence, generate_sequences
from paceline.model import Decoder, load_model
from paceline.model.tokenizer import load_tokenizer
from paceline.setup.device import choose_device
from paceline.spot.buffer import ANY_LENGTH, SpotBuffer
from paceline.spot.samples import FeatureSample, cut, lay_out
from paceline.tasks.countdown import Countdown

WAYS = [
    ("shortest", "beginning"), ("random", "pieces"), ("longest and random", "pieces"), ("longest", "beginning"),
    ("longest", "pieces"), ("buffer, longest only", "pieces"), ("buffer, any length", "pieces"),
]  # fmt: skip
FROM = (0, 200, 500)  # tokens of a prompt and its answer, from which on drafters are evaluated
RUNS = 5  # draft tokens in a chain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--answers", type=int, default=576)
    parser.add_argument("--samples", type=int, default=4, help="answers to each problem")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--updates", type=int, default=100, help="of the drafter in each step")
    parser.add_argument("--step-tokens", type=int, default=192, help="of each update")
    parser.add_argument("--share", type=float, default=0.15, help="of a step's tokens that are kept")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--ways", type=int, nargs="*", default=range(len(WAYS)), help="which of them, by number")
    args = parser.parse_args()
    policy = load_model(args.model, device=choose_device("auto"))
    groups = write_groups(args, policy)
    rows = []
    for keep, show in (WAYS[i] for i in args.ways):
        started = time.perf_counter()
        each = [train(args, policy, groups, keep, show, seed) for seed in range(args.seeds)]
        means = [round(statistics.fmean(values), 3) for values in zip(*each, strict=True)]
        rows.append({"keeps": keep, "shows": show, "accept_length": means, "by_seed": each})
        shown = "  ".join(f"from {first} on {value:.2f}" for first, value in zip(FROM, means, strict=True))
        print(f"{keep:<21} {show:<10} {shown}  ({time.perf_counter() - started:.0f} s)", flush=True)
    print(json.dumps({"settings": vars(args) | {"ways": list(args.ways)}, "from": FROM, "rows": rows}))


def write_groups(args: argparse.Namespace, policy: Decoder) -> list[list[TokenSequence]]:
    """Answers by problem."""
    tokenizer, task = load_tokenizer(args.model), Countdown("tail", "search", seed=3)
    sampling = SamplingParams(max_tokens=args.max_tokens, stop_token_ids=tokenizer.eos_ids)
    prompts = (tuple(tokenizer.encode_prompt(task.sample(i // args.samples).prompt)) for i in range(args.answers))
    texts = generate_sequences(policy, [Request(i, prompt, sampling) for i, prompt in enumerate(prompts)])
    groups: dict[tuple[int, ...], list[TokenSequence]] = {}
    for tokens, prompt in texts:
        groups.setdefault(tuple(tokens[:prompt]), []).append((tokens, prompt))
    lengths = sorted(len(tokens) for tokens, _ in texts)
    print(
        f"{len(texts)} texts of {lengths[0]} to {lengths[-1]} tokens, half of them below {lengths[len(lengths) // 2]}"
    )
    return [groups[key] for key in sorted(groups)]


def choose(texts: Sequence[TokenSequence], room: int, keep: str, rng: random.Random) -> list[TokenSequence]:
    """Texts of at most so many tokens together."""
    by_length = sorted(texts, key=lambda text: len(text[0]))
    if keep == "shortest":  # what was left when answers came longest first and what came first had to go
        return _fill(by_length, room)
    if keep == "longest":
        return _fill(by_length[::-1], room)
    mixed = list(by_length)
    rng.shuffle(mixed)
    if keep == "random":
        return _fill(mixed, room)
    if keep == "longest and random":
        longest = _fill(by_length[::-1], room * 3 // 4)
        known = {id(text) for text in longest}
        return longest + _fill([text for text in mixed if id(text) not in known], room // 4)
    buffer = SpotBuffer(4 * room, ANY_LENGTH if keep == "buffer, any length" else 0.0)
    entries = [(buffer.reserve(tokens, prompt, 0), text) for text in mixed for tokens, prompt in [text]]
    return [(text[0][: len(e)], text[1]) for e, text in entries if e and not (e.evicted or e.held_out)]


def _fill(texts: Sequence[TokenSequence], room: int) -> list[TokenSequence]:
    kept = []
    for text in texts:
        if len(text[0]) <= room:
            kept.append(text)
            room -= len(text[0])
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
    evaluated, seen = [text for group in groups[:unseen] for text in group], groups[unseen:]
    drafter = new_drafter(policy, 128, seed=seed)
    trainer = DrafterTrainer(drafter, TrainSettings(lr=suitable_rate(policy), runs=RUNS))
    each = len(seen) // args.steps
    for step in range(args.steps):
        texts = [text for group in seen[step * each : (step + 1) * each] for text in group]
        room = int(args.share * sum(len(tokens) for tokens, _ in texts))
        samples = [_sample(drafter, text) for text in choose(texts, room, keep, rng)]
        left = args.updates
        while left > 0:
            pieces = [piece for sample in samples for piece in show_part(sample, show, args.step_tokens, rng)]
            for pack in list(batches(pieces, args.step_tokens, rng.shuffle, len))[:left]:
                trainer.step(lay_out(pack))
                left -= 1
    trainer.publish()
    return [round(evaluate(drafter, evaluated, first), 3) for first in FROM]


def _sample(drafter: EagleModel, text: TokenSequence) -> FeatureSample:
    got = read_sequences(drafter, [text])
    return FeatureSample(got.tokens.int(), text[1], got.features, got.hidden).on_host()


def evaluate(drafter: EagleModel, texts: list[TokenSequence], first: int) -> float:
    got: Any = read_sequences(drafter, texts)
    got.learn &= got.place >= first
    return expected_accept_length(drafter, got, RUNS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
