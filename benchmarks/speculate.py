"""Every strategy at every batch size: tokens/s, accept length, what the tuner picks, and the best in hindsight.

    python benchmarks/speculate.py --model MODEL [--drafter FOLDER] --batch 1,8,32,64,128,256

MODEL answers Countdown problems: `embedded`, or one made on a GPU with

    python benchmarks/make_reasoner.py --preset 100m --minutes 4 --out MODEL
    paceline draft train --model MODEL --answers 4000 --minutes 1.5 --window 128 --out MODEL/drafter \\
        --set rollout.max_tokens=700

Each batch size gets more requests than fit, so that the batch stays full; only rounds with a full batch count, and none
in which a graph was captured. Strategies take turns, --repeat times; figures are medians. The tuner is then compared
with plain decoding and with the best in hindsight, turn by turn, because a machine that is slower for a second would
favour whoever ran before: the median of --pairs ratios counts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.core import Request, SamplingParams
from paceline.draft.base import Draft, DraftSequence
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.files import find_drafter, load_drafter
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.suffix.drafter import SuffixDrafter
from paceline.model import load_model
from paceline.model.decoder import Decoder
from paceline.model.tokenizer import Tokenizer, load_tokenizer
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.rollout.stats import RoundRecord
from paceline.setup.device import choose_device
from paceline.tasks.countdown import Countdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--batch", default="1,8,32,64,128,256")
    parser.add_argument("--difficulty", default="medium")
    parser.add_argument("--tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=5, help="turns of the tuner against the best strategy")
    parser.add_argument("--strategies", help="comma-separated; a default set otherwise")
    args = parser.parse_args()
    device = choose_device("auto")
    model, tokenizer = load_model(args.model, device=device), load_tokenizer(args.model)
    folder = find_drafter(args.drafter, args.model)
    rows = []
    print(f"{'batch':>5}  {'strategy':<16} {'tokens/s':>9}  {'of plain':>8}  {'accept':>6}")
    for batch in map(int, args.batch.split(",")):
        row = measure(args, model, tokenizer, folder, batch)
        rows.append(row)
        plain = row["plain_tok_s"]
        for name, s in row["strategies"].items():
            print(f"{batch:>5}  {name:<16} {s['tok_s']:>9,.0f}  {s['tok_s'] / plain:>8.2f}  {s['accept_length']:>6.2f}")
        print(
            f"{batch:>5}  {'tuner':<16} {row['tuner_tok_s']:>9,.0f}  {row['speedup']:>8.2f}  mostly "
            f"{row['tuner_choice']}; best in hindsight {row['best']}, of which it reached {row['of_best']:.0%} "
            f"({row['of_best_range'][0]:.0%} to {row['of_best_range'][1]:.0%})",
            flush=True,
        )
        if row["suffix_us"] is not None:
            print(
                f"{batch:>5}  drafting from suffixes takes {row['suffix_us']:.0f} µs of the host, "
                f"{row['suffix_share']:.1%} of a plain round",
                flush=True,
            )
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        json.dumps(
            {"model": args.model, "device": name, "dtype": str(model.dtype), "repeat": args.repeat, "rows": rows}
        )
    )


def measure(
    args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer, folder: Path | None, batch: int
) -> dict[str, Any]:
    suffix = TimedSuffix(batch, model.config.max_positions)
    drafters: list[Any] = [suffix]
    if folder is not None:
        drafters.append(EagleDrafter(load_drafter(folder, model)))
    chosen = [Strategy.parse(s) for s in args.strategies.split(",")] if args.strategies else None
    engine = RolloutEngine(model, EngineSettings(max_batch=batch), None, drafters, chosen)
    work = Work(args, tokenizer, batch)
    strategies = [PLAIN, *(s for s in engine.strategies if not s.plain)]
    for strategy in strategies:
        run(engine, work, lambda _, s=strategy: s)  # graphs, kernels, caches
    run(engine, work, None)
    suffix.seconds.clear()
    speeds: dict[str, list[float]] = {str(s): [] for s in strategies}
    accept: dict[str, float] = {}
    used: Counter[str] = Counter()
    for _ in range(args.repeat):
        for strategy in strategies:
            speed, accept[str(strategy)], _ = run(engine, work, lambda _, s=strategy: s)
            speeds[str(strategy)].append(speed)
    medians = {name: statistics.median(s) for name, s in speeds.items()}
    best = max(strategies, key=lambda s: medians[str(s)])
    turns: dict[str, list[float]] = {"tuner": [], "best": [], "plain": []}
    for turn in range(args.pairs):
        for name in list(turns)[:: 1 if turn % 2 else -1]:
            choose = {"tuner": None, "best": lambda _: best, "plain": lambda _: PLAIN}[name]
            speed, _, counts = run(engine, work, choose)
            turns[name].append(speed)
            used.update(counts if name == "tuner" else {})
    ratio = lambda other: [t / o for t, o in zip(turns["tuner"], turns[other], strict=True)]  # noqa: E731
    drafting = statistics.median(suffix.seconds) if suffix.seconds else None  # no strategy drafts from suffixes
    return {
        "batch": batch,
        "plain_tok_s": round(medians["plain"], 1),
        "strategies": {n: {"tok_s": round(v, 1), "accept_length": round(accept[n], 3)} for n, v in medians.items()},
        "tuner_tok_s": round(statistics.median(turns["tuner"]), 1),
        "tuner_choice": used.most_common(1)[0][0],
        "tuner_rounds": dict(used.most_common()),
        "best": str(best),
        "of_best": round(statistics.median(ratio("best")), 4),
        "of_best_range": [round(min(ratio("best")), 4), round(max(ratio("best")), 4)],
        "speedup": round(statistics.median(ratio("plain")), 3),
        "speedup_range": [round(min(ratio("plain")), 3), round(max(ratio("plain")), 3)],
        "suffix_us": drafting and round(1e6 * drafting, 1),
        "suffix_share": drafting and round(drafting * medians["plain"] / batch, 4),
    }


class TimedSuffix(SuffixDrafter):
    """Measures what the chains of a full batch cost the host, which is time that the device waits."""

    def __init__(self, batch: int, max_length: int):
        super().__init__(batch, max_length)
        self.batch = batch
        self.seconds: list[float] = []

    def propose(self, sequences: Sequence[DraftSequence], strategy: Strategy) -> Draft:
        started = time.perf_counter()
        draft = super().propose(sequences, strategy)
        if len(sequences) == self.batch and strategy.chain:
            self.seconds.append(time.perf_counter() - started)
        return draft


class Work:
    """More requests than fit, with new ids every time."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer, batch: int):
        task = Countdown(args.difficulty, "search", seed=1)
        self.count = batch + max(8, batch)
        self.prompts = [tuple(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(self.count)]
        self.sampling = SamplingParams(max_tokens=args.tokens, stop_token_ids=tokenizer.eos_ids)
        self.next = 0

    def requests(self) -> list[Request]:
        self.next += self.count
        return [Request(self.next + i, p, self.sampling) for i, p in enumerate(self.prompts)]


def run(engine: RolloutEngine, work: Work, choose: Any) -> tuple[float, float, dict[str, int]]:
    """Tokens/s and tokens per sequence of the rounds with a full batch, and how often each strategy ran."""
    rounds: list[RoundRecord] = []
    engine.choose, engine.record = choose, rounds.append
    for _ in engine.run(work.requests()):
        pass
    full = [r for r in rounds if r.batch == engine.settings.max_batch and r.strategy != "prefill"]
    typical = statistics.median(r.seconds for r in full)
    full = [r for r in full if r.seconds < 20 * typical]  # a graph was captured
    counts: dict[str, int] = {}
    for r in full:
        counts[r.strategy] = counts.get(r.strategy, 0) + 1
    tokens, sequences = sum(r.tokens for r in full), sum(r.batch for r in full)
    return tokens / sum(r.seconds for r in full), tokens / sequences, counts


if __name__ == "__main__":
    main()
