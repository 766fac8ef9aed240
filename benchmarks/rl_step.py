"""Whole GRPO steps, plain against adaptive: seconds, rewards, joules, memory, and where the time goes.

    python benchmarks/rl_step.py --model DEEP --steps 10                   # a long tail: 16 prompts x 8 answers
    python benchmarks/rl_step.py --model DEEP --steps 4 --flat 512         # 128 answers of the same length

Each step's prompts are rolled out in both modes from the same weights with the same noise, each first in turn, and
learned from once, as `paceline compare` does it; a whole step of a mode is its own rollout and rewards, and the update
that both share. The first step captures graphs and is left out of the ratios, but not of the rewards. The end shows the
rollouts' seconds by batch size, and the FLOP/s of the update as a share of those of one large matmul. Checkpoints are
not written. MODEL is `embedded`, or one made as make_reasoner.py says. The last line is JSON.
"""

from __future__ import annotations

import time

STARTED = time.time()

import argparse  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import tempfile  # noqa: E402
from collections import Counter, defaultdict  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import fmean, median, stdev  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from limits import matmul_rate, weights_per_token  # noqa: E402
from paceline.commands.compare import Comparison  # noqa: E402
from paceline.commands.compared import ADAPTIVE_MODE, PLAIN_MODE, ComparedStep, joules_per_step  # noqa: E402
from paceline.config import Config, load_config  # noqa: E402
from paceline.model import Decoder  # noqa: E402
from paceline.model.checkpoint import find_model, read_config  # noqa: E402
from paceline.observe.live import LiveView  # noqa: E402
from paceline.rollout.stats import PARTS, RoundRecord  # noqa: E402
from paceline.run import Run  # noqa: E402
from paceline.setup.device import choose_device  # noqa: E402
from paceline.setup.memory import gb  # noqa: E402

WARM_UP = 1  # steps that are left out of the ratios
UNUSUAL = 5.0  # times the median of its strategy and batch size: a round that captured a graph, or had to wait


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--steps", type=int, default=10, help="that are measured; one more is made before them")
    parser.add_argument("--seconds", type=float, help="stop after the step in which this many have passed")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--difficulty", default="tail")
    parser.add_argument("--flat", type=int, metavar="TOKENS", help="all answers have this length")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--micro-tokens", type=int, default=8448)
    parser.add_argument("--explain", type=int, default=2, help="differences per step that are explained")
    parser.add_argument("--strategies", action="store_true", help="print what each adaptive rollout was decoded with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting")
    return parser.parse_args()


def settings_of(args: argparse.Namespace, folder: Path) -> Config:
    longest = args.flat or args.max_tokens
    words = [
        f"model.path={args.model}", f"steps={args.steps + WARM_UP}", f"seed={args.seed}", f"run_dir={folder / 'run'}",
        "cluster.workers=1", "task.problems=null", f"task.difficulty={args.difficulty}", "task.max_prompt_tokens=64",
        f"rollout.prompts={args.prompts}", f"rollout.samples={args.samples}", f"rollout.max_tokens={longest}",
        f"rollout.min_tokens={args.flat or 0}", "learn.algorithm=grpo", "learn.aggregate=token_mean",
        f"learn.lr={args.lr}", "learn.warmup_steps=0", "learn.overlong_buffer=0",
        f"learn.micro_tokens={args.micro_tokens}", "learn.optimizer_dtype=bfloat16",
        "learn.activation_checkpointing=true", "checkpoint.every=0", "log.tensorboard=false",
    ]  # fmt: skip
    return load_config("default", [*words, *args.set])


class Watcher(LiveView):
    """Notes when the first token was written."""

    def __init__(self, config: Config):
        super().__init__(config, quiet=True)
        self.first_token_s: float | None = None

    def say(self, text: str) -> None:
        print(text, flush=True)

    def rollout_progress(self, finished: int, tokens: int) -> None:
        if self.first_token_s is None and tokens:
            self.first_token_s = time.time() - STARTED


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        config = settings_of(args, Path(folder))
        print(json.dumps(measure(args, config)))


def measure(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    device = choose_device(config.model.device)
    view = Watcher(config)
    cuda = device.type == "cuda"
    with torch.device("meta"):
        weights = weights_per_token(Decoder(read_config(find_model(args.model))))
    rate = matmul_rate(device)  # first: later there may be too little memory for it
    if cuda:
        torch.cuda.empty_cache()
    trainer = Comparison(config, Run.create(config), view)
    trainer.max_explained = args.explain
    ready = time.time() - STARTED
    print(f"ready after {ready:.1f} s", flush=True)
    rounds: dict[str, list[RoundRecord]] = {PLAIN_MODE: [], ADAPTIVE_MODE: []}
    strategies = []
    try:
        for _ in range(config.steps):
            trainer.step()
            for mode, some in rounds.items():
                some.extend(trainer.rounds[mode] if len(trainer.steps) > WARM_UP else ())
            gc.collect()
            print(line_of(len(trainer.steps), trainer.steps[-1]), flush=True)
            strategies.append(by_strategy(trainer.rounds[ADAPTIVE_MODE]))
            if args.strategies:
                print("         " + ", ".join(f"{name} {n} in {s:.2f} s" for name, (n, s) in strategies[-1].items()))
            if args.seconds and time.time() - STARTED > args.seconds and len(trainer.steps) > WARM_UP:
                break
    finally:
        trainer.close()
    result = summarize(trainer.steps)
    result |= {
        "update": update_speed(trainer.steps, weights, rate),
        "requests": by_requests(rounds, result["steps"]),
        "model": args.model,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        "settings": {k: v for k, v in vars(args).items() if k != "model"},
        "first_token_s": round(view.first_token_s or 0.0, 1),
        "ready_s": round(ready, 1),
        "plan_gb": {name: float(gb(size)) for name, size in trainer.plan.parts.items()} if trainer.plan else None,
        "peak_gb": round(torch.cuda.max_memory_reserved() / 1e9, 1) if cuda else None,
        "rows": [row_of(s) | {"strategies": used} for s, used in zip(trainer.steps, strategies, strict=True)],
    }
    print_summary(result)
    return result


def line_of(number: int, s: ComparedStep) -> str:
    m = s.metrics
    plain, adaptive = s.modes[PLAIN_MODE], s.modes[ADAPTIVE_MODE]
    return (
        f"step {number:>2}  plain {plain.rollout_s:.2f} s, adaptive {adaptive.rollout_s:.2f} s ({s.speedup:.2f}), "
        f"rest {s.rest_s:.2f} s  whole {whole(s, PLAIN_MODE) / whole(s, ADAPTIVE_MODE):.2f}  "
        f"reward {plain.mean_reward:.3f} {adaptive.mean_reward:.3f}  "
        f"length {m['response_length/mean']:.0f}, p50 {m['response_length/p50']:.0f}, "
        f"max {m['response_length/max']:.0f}  accept length {m['rollout/spec_accept_length']:.2f}"
    )


def whole(s: ComparedStep, mode: str) -> float:
    """Seconds of a step in this mode only."""
    return s.modes[mode].rollout_s + s.rest_s - s.modes[ADAPTIVE_MODE].reward_s + s.modes[mode].reward_s


def row_of(s: ComparedStep) -> dict[str, Any]:
    m = s.metrics
    names = ("response_length/mean", "response_length/p50", "response_length/p99", "response_length/max",
             "rollout/spec_accept_length", "timing_s/update_actor", "timing_s/train_drafter", "actor/grad_norm",
             "actor/tokens", "rollout_corr/kl", "rollout/graph_gb")  # fmt: skip
    modes = s.modes.items()
    return {
        "rollout_s": {name: round(mode.rollout_s, 3) for name, mode in modes},
        "reward_s": {name: round(mode.reward_s, 3) for name, mode in modes},
        "rest_s": round(s.rest_s, 3),
        "rewards": {name: round(mode.mean_reward, 4) for name, mode in modes},
        "tokens": {name: sum(mode.lengths) for name, mode in modes},
        "longest": {name: max(mode.lengths) for name, mode in modes},
        "joules": {name: None if mode.joules is None else round(mode.joules) for name, mode in modes},
        "rest_joules": None if s.rest_joules is None else round(s.rest_joules),
        "identical": s.identity.responses - s.identity.different,
        "looked_into": len(s.identity.differences),
        "near_ties": sum(d.near_tie for d in s.identity.differences),
        "shares": {part: round(m.get(f"rollout/share/{part}", 0.0), 3) for part in PARTS},
    } | {name: round(m[name], 4) for name in names if name in m}


def summarize(steps: list[ComparedStep]) -> dict[str, Any]:
    """Speeds of the steps after the first, and the rewards of all."""
    late = steps[WARM_UP:] or steps
    ratios = sorted(whole(s, PLAIN_MODE) / whole(s, ADAPTIVE_MODE) for s in late)
    rollouts = sorted(s.speedup for s in late)
    modes = [PLAIN_MODE, ADAPTIVE_MODE]
    gap = [s.modes[ADAPTIVE_MODE].mean_reward - s.modes[PLAIN_MODE].mean_reward for s in steps]
    lengths = [s.metrics["response_length/p99"] / max(1.0, s.metrics["response_length/p50"]) for s in steps]
    return {
        "steps": len(late),
        "step_speedup": round(median(ratios), 3),
        "step_speedup_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "step_speedup_total": round(
            sum(whole(s, PLAIN_MODE) for s in late) / sum(whole(s, ADAPTIVE_MODE) for s in late), 3
        ),
        "rollout_speedup": round(median(rollouts), 3),
        "rollout_speedup_range": [round(rollouts[0], 3), round(rollouts[-1], 3)],
        "rollout_s": {mode: round(fmean(s.modes[mode].rollout_s for s in late), 3) for mode in modes},
        "reward_s": {mode: round(fmean(s.modes[mode].reward_s for s in late), 3) for mode in modes},
        "update_s": round(fmean(s.metrics["timing_s/update_actor"] for s in late), 3),
        "step_s": {mode: round(fmean(whole(s, mode) for s in late), 3) for mode in modes},
        "longest": {mode: round(fmean(max(s.modes[mode].lengths) for s in late)) for mode in modes},
        "tokens": {mode: round(fmean(sum(s.modes[mode].lengths) for s in late)) for mode in modes},
        "joules_per_step": joules_per_step(late, modes),
        "reward": {mode: round(fmean(s.modes[mode].mean_reward for s in steps), 4) for mode in modes},
        "reward_gap": round(fmean(gap), 4),
        "reward_gap_error": round(stdev(gap) / len(gap) ** 0.5, 4) if len(gap) > 1 else None,
        "better": sum(s.better for s in steps),
        "worse": sum(s.worse for s in steps),
        "accept_length": round(fmean(s.metrics["rollout/spec_accept_length"] for s in late), 3),
        "tail": round(median(lengths), 2),
        "responses": sum(s.identity.responses for s in steps),
        "identical": sum(s.identity.responses - s.identity.different for s in steps),
        "looked_into": sum(len(s.identity.differences) for s in steps),
        "near_ties": sum(d.near_tie for s in steps for d in s.identity.differences),
        "shares": {p: round(fmean(s.metrics.get(f"rollout/share/{p}", 0.0) for s in late), 3) for p in PARTS},
    }


def update_speed(steps: list[ComparedStep], weights: int, rate: float) -> dict[str, Any]:
    """FLOP/s of the matmuls of an update, forward and backward: 6 x weights x tokens / seconds. Attention, which is
    little, and what is recomputed to save memory are not counted."""
    late = steps[WARM_UP:] or steps
    tokens = sum(s.metrics["actor/tokens"] for s in late)
    reached = 6 * weights * tokens / sum(s.metrics["timing_s/update_actor"] for s in late)
    return {
        "tokens": round(tokens / len(late)),
        "flop_s": reached,
        "product_flop_s": rate,
        "share": round(reached / rate, 3),
    }


def by_strategy(rounds: list[RoundRecord]) -> dict[str, tuple[int, float]]:
    """Rounds of an adaptive rollout and their seconds, with all sequences and with fewer, by strategy; most first."""
    most = max((r.batch for r in rounds), default=0)
    found: dict[str, list[float]] = defaultdict(list)
    for r in rounds:
        found[f"{r.strategy} {'with all' if r.batch == most else 'with fewer'}"].append(r.seconds)
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))
    return {name: (len(seconds), round(sum(seconds), 4)) for name, seconds in ordered}


def by_requests(rounds: dict[str, list[RoundRecord]], steps: int) -> list[dict[str, Any]]:
    """Per step and by batch size (1, 2, up to 4, up to 8, ...): seconds of each mode; of the adaptive one also seconds
    above the median in rounds that took unusually long, tokens per request and round, the strategy that took most."""
    table: dict[int, dict[str, list[RoundRecord]]] = defaultdict(lambda: {mode: [] for mode in rounds})
    for mode, some in rounds.items():
        for r in some:
            if r.strategy != "prefill":
                table[1 << max(0, r.batch - 1).bit_length()][mode].append(r)
    rows = []
    for most, modes in sorted(table.items()):
        row: dict[str, Any] = {"up_to": most}
        row["seconds"] = {mode: round(sum(r.seconds for r in some) / steps, 3) for mode, some in modes.items()}
        by_strategy: dict[str, list[float]] = defaultdict(list)
        for r in modes[ADAPTIVE_MODE]:
            by_strategy[r.strategy].append(r.seconds)
        usual = {strategy: median(times) for strategy, times in by_strategy.items()}
        over = sum(t - usual[s] for s, times in by_strategy.items() for t in times if t > UNUSUAL * usual[s])
        seconds = Counter({strategy: sum(times) for strategy, times in by_strategy.items()})
        sequences = sum(r.batch for r in modes[ADAPTIVE_MODE])
        row |= {
            "unusual_s": round(over / steps, 3),
            "tokens_per_round": round(sum(r.tokens for r in modes[ADAPTIVE_MODE]) / max(1, sequences), 2),
            "mostly": seconds.most_common(1)[0][0] if seconds else None,
        }
        rows.append(row)
    return rows


def print_summary(r: dict[str, Any]) -> None:
    low, high = r["step_speedup_range"]
    print(f"\nwhole step   {r['step_s'][PLAIN_MODE]:.2f} s plain, {r['step_s'][ADAPTIVE_MODE]:.2f} s adaptive: "
          f"{r['step_speedup']:.2f} times faster (median of {r['steps']}, {low:.2f} to {high:.2f})")  # fmt: skip
    print(f"rollout      {r['rollout_s'][PLAIN_MODE]:.2f} s plain, {r['rollout_s'][ADAPTIVE_MODE]:.2f} s adaptive: "
          f"{r['rollout_speedup']:.2f} times faster; update {r['update_s']:.2f} s; of the adaptive rollout "
          + ", ".join(f"{part} {share:.0%}" for part, share in r["shares"].items()))  # fmt: skip
    print(f"answers      {r['identical']} of {r['responses']} identical; of {r['looked_into']} others that were "
          f"explained, {r['near_ties']} differ by a near-tie; "
          f"longest {r['longest'][PLAIN_MODE]} plain, {r['longest'][ADAPTIVE_MODE]} adaptive; "
          f"p99 / p50 {r['tail']:.1f}; accept length {r['accept_length']:.2f}")  # fmt: skip
    update = r["update"]
    print(f"update       {update['tokens']:,} tokens of groups with a signal, {update['flop_s'] / 1e12:.3g} TFLOP/s: "
          f"{update['share']:.0%} of a large matmul's speed")  # fmt: skip
    error = r["reward_gap_error"]
    print(f"reward       {r['reward'][PLAIN_MODE]:.4f} plain, {r['reward'][ADAPTIVE_MODE]:.4f} adaptive: "
          f"{r['reward_gap']:+.4f} ± {error if error is not None else float('nan'):.4f}; "
          f"{r['better']} answers got more, {r['worse']} less")  # fmt: skip
    joules = r["joules_per_step"]
    if joules[PLAIN_MODE] is not None:
        print(f"energy       {joules[PLAIN_MODE]:,.0f} J a step plain, {joules[ADAPTIVE_MODE]:,.0f} J adaptive")
    if r["peak_gb"] is not None:
        print(f"memory       {r['peak_gb']} GB at most")
    print(f"start        first token after {r['first_token_s']} s")
    print("\nrequests     plain  adaptive          unusual  tokens a round  mostly")
    for row in r["requests"]:
        plain, adaptive = row["seconds"][PLAIN_MODE], row["seconds"][ADAPTIVE_MODE]
        ratio = f"({plain / adaptive:.2f})" if plain and adaptive else ""
        print(f"up to {row['up_to']:<5} {plain:>5.2f} s  {adaptive:>6.2f} s {ratio:>7}  {row['unusual_s']:>5.2f} s  "
              f"{row['tokens_per_round']:>14.2f}  {row['mostly'] or ''}")  # fmt: skip


if __name__ == "__main__":
    main()
