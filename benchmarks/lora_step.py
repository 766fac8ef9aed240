"""RL steps that train LoRA adapters against steps that train all weights, of the same model: memory, rollout, update.

    python benchmarks/lora_step.py --geometry 7b --steps 4                      # on an H200: six minutes
    python benchmarks/lora_step.py --model DEEP --variants lora-limited --limit-gb 24 --tokens 256 --micro-tokens 2048
    python benchmarks/lora_step.py --geometry tiny --steps 2 --tokens 16 --prompts 2 --samples 2      # on a CPU

Variants: `full` trains all weights, `lora` adapters with the same settings, and `lora-limited` the same on a card that
has --limit-gb: the memory plan counts with no more, and PyTorch may not allocate more. Each runs in a process of its
own. All answers have --tokens tokens and are decoded plainly, and the reward is a coin, so that every variant decodes
and learns from as many tokens. Without --model the weights are random. The first step of each, which captures graphs,
is left out. The lines before the last say whether LoRA fits the limit, decodes as fast and learns at least 1.3 times as
fast; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

WARM_UP_STEPS = 1
VARIANTS = ("full", "lora", "lora-limited")
UNCHANGED = 0.97  # of the tokens per second without LoRA, from which on the rollout is as fast
FASTER = 1.3  # times as fast as an update of all weights


def coin(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
    """Heads or tails by the tokens of an answer: nearly every group has both."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; random weights of --geometry by default")
    parser.add_argument("--geometry", default="7b", help="7b, 1.5b, 0.5b, 100m or tiny")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4, help="that are measured; one more is made before them")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of every answer")
    parser.add_argument("--micro-tokens", type=int, default=8192)
    parser.add_argument("--keep-activations", action="store_true", help="no activation checkpointing, in any variant")
    parser.add_argument("--limit-gb", type=float, default=40.0)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # the variant that a process of its own measures
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    if args.only:
        print(json.dumps(measure(args, args.only)))
        return
    wanted = args.variants.split(",")
    if unknown := set(wanted) - set(VARIANTS):
        sys.exit(f"no variant is called {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    with tempfile.TemporaryDirectory() as folder:
        words = sys.argv[1:]
        if args.model is None:
            words += ["--model", folder]
            subprocess.run([sys.executable, __file__, *words, "--only", "make"], check=True, stdout=subprocess.DEVNULL)
        results = {name: run(words, name) for name in wanted}
    print_table(results)
    print("\n".join(verdict(results, args.limit_gb)))
    settings = {key: value for key, value in vars(args).items() if key not in ("only", "variants")}
    print(json.dumps({"settings": settings, "variants": results, "ratios": ratios(results)}))


def run(words: list[str], name: str) -> dict[str, Any]:
    """Measure a variant in a process of its own."""
    command = [sys.executable, __file__, *words, "--only", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    *lines, last = done.stdout.strip().splitlines() or [""]
    print("\n".join(f"{name:<13} {line}" for line in lines), flush=True)
    if done.returncode:
        print(f"{name:<13} {last}\n{name:<13} failed with exit code {done.returncode}", flush=True)
        return {"failed": done.returncode}
    result: dict[str, Any] = json.loads(last)
    return result


def settings_of(args: argparse.Namespace, name: str, folder: str) -> list[str]:
    words = [
        f"model.path={args.model}", f"steps={args.steps + WARM_UP_STEPS}", f"run_dir={folder}/run", "cluster.workers=1",
        "task.name=countdown", "task.max_prompt_tokens=64", "task.style=search",
        f"rollout.prompts={args.prompts}", f"rollout.samples={args.samples}",
        f"rollout.max_tokens={args.tokens}", f"rollout.min_tokens={args.tokens}", "speculation.mode=plain",
        f"reward.functions=[{{function: '{__file__}:coin'}}]", "reward.workers=0", "learn.lr=1e-6",
        "learn.aggregate=token_mean", f"learn.micro_tokens={args.micro_tokens}", "learn.optimizer_dtype=bfloat16",
        f"learn.activation_checkpointing={str(not args.keep_activations).lower()}", "checkpoint.every=0",
        "log.tensorboard=false",
    ]  # fmt: skip
    return [*words, *([] if name == "full" else [f"learn.lora.rank={args.rank}"]), *args.set]


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    import torch

    from paceline.config import load_config
    from paceline.loop import TrainLoop
    from paceline.run import Run
    from paceline.setup import memory
    from paceline.setup.device import choose_device

    device = choose_device("auto")
    if name == "make":
        make_random(args, device)
        return {}
    if name == "lora-limited":
        limit = int(args.limit_gb * 1e9)
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        small = memory.DeviceMemory(f"a card of {args.limit_gb:g} GB", limit, device.type == "cuda")
        memory.find_memory = lambda config: small
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(None, settings_of(args, name, folder))
        started = Run.create(config)
        loop = TrainLoop(started.config, started)
        assert loop.plan is not None
        print(loop.plan.line(), flush=True)
        rows = []
        try:
            for number in range(config.steps):
                rows.append(loop.step())
                rows[-1]["tokens"] = rows[-1]["response_length/mean"] * args.prompts * args.samples
                print(line_of(number, rows[-1]), flush=True)
        finally:
            loop.close()
    return summarize(rows) | {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "plan_gb": {part: float(memory.gb(size)) for part, size in loop.plan.parts.items()},
        "base": loop.plan.lora_base,
        "allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else None,
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if device.type == "cuda" else None,
        "used_gb": used_gb() if device.type == "cuda" else None,
    }


def used_gb() -> float:
    """Of the whole card at the end: what PyTorch keeps, and what CUDA and its libraries take beside it."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 1e9, 2)


def make_random(args: argparse.Namespace, device: Any) -> None:
    """Random weights of a known geometry, with a tokenizer that knows the first tokens."""
    import torch

    from make_reasoner import make_tokenizer
    from paceline.model import save_model
    from passes import config_of, make_model

    torch.manual_seed(0)
    longest = args.tokens + 128
    save_model(make_model(config_of(args.geometry, longest), device), Path(args.model))
    make_tokenizer(Path(args.model), longest)


def line_of(number: int, row: dict[str, float]) -> str:
    warm_up = " (warm-up)" if number < WARM_UP_STEPS else ""
    return (
        f"step {number + 1}{warm_up}: rollout {row['timing_s/gen']:.2f} s, {rollout_speed(row):,.0f} tokens/s; "
        f"update {row['timing_s/update_actor']:.2f} s of {row['actor/tokens']:,.0f} tokens"
    )


def rollout_speed(row: dict[str, float]) -> float:
    """Tokens per second of the rollout."""
    return row["tokens"] / row["timing_s/gen"]


def summarize(rows: list[dict[str, float]]) -> dict[str, Any]:
    late = rows[WARM_UP_STEPS:] or rows
    update_s = sum(row["timing_s/update_actor"] for row in late)
    return {
        "steps": len(late),
        "rollout_tokens_per_s": round(median(map(rollout_speed, late)), 1),
        "update_s": round(fmean(row["timing_s/update_actor"] for row in late), 4),
        "update_tokens": round(fmean(row["actor/tokens"] for row in late)),
        "update_tokens_per_s": round(sum(row["actor/tokens"] for row in late) / update_s, 1),
        "grad_norm": round(fmean(row["actor/grad_norm"] for row in late), 6),
    }


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each variant to training all weights."""
    full = results.get("full", {})
    names = ("rollout_tokens_per_s", "update_tokens_per_s")
    return {
        variant: {name: round(one[name] / full[name], 3) for name in names}
        for variant, one in results.items()
        if variant != "full" and "steps" in one and "steps" in full
    }


def verdict(results: dict[str, dict[str, Any]], limit_gb: float) -> list[str]:
    """What LoRA is to bring, and whether it does: to fit the limit, to decode as fast, to learn faster."""
    limited = results.get("lora-limited", {})
    used = limited.get("used_gb")
    fits = f"{used:g} GB of the card were used" if used is not None else "memory was not measured"
    if "failed" in limited:
        fits, used = "the run failed", limit_gb + 1
    found = [(f"memory: {fits}, at most {limit_gb:g} GB", None if used is None else used <= limit_gb)]
    ratio = ratios(results).get("lora", {})
    for name, words, least in (("rollout", "with LoRA over without", UNCHANGED), ("update", "LoRA over full", FASTER)):
        value = ratio.get(f"{name}_tokens_per_s")
        shown = "was not measured" if value is None else f"{value:.2f} times"
        found.append((f"{name}, {words}: {shown}, at least {least:g}", None if value is None else value >= least))
    words = {True: "holds", False: "does not hold", None: "unknown"}
    return [f"{sentence}: {words[holds]}" for sentence, holds in found]


def print_table(results: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'':<13} {'rollout':>16} {'update':>10} {'':>16} {'memory at most':>15}  base")
    for name, one in results.items():
        if "steps" not in one:
            print(f"{name:<13} failed")
            continue
        peak = f"{one['reserved_gb']:.1f} GB" if one["reserved_gb"] is not None else "-"
        print(
            f"{name:<13} {one['rollout_tokens_per_s']:>7,.0f} tokens/s {one['update_s']:>8.2f} s "
            f"{one['update_tokens_per_s']:>7,.0f} tokens/s {peak:>15}  {one['base'] or '-'}"
        )
    for name, one in ratios(results).items():
        print(f"{name}: rollout {one['rollout_tokens_per_s']:.2f} times, update {one['update_tokens_per_s']:.2f} times "
              "as fast as training all weights")  # fmt: skip


if __name__ == "__main__":
    main()
