"""Does the engine decode while tools wait? Rollouts with tool calls in half of the answers, and what they could take.

    python benchmarks/tool_wait.py --seconds 0.5

The embedded reasoner answers Countdown problems in float64 on the CPU, or in bfloat16 on a GPU. Half of its answers
call a tool, each up to `--calls` times in a row, and go on behind what it returns. The same conversations, token by
token, are rolled out with a tool that takes no time ("decoding alone") and with one that takes `--seconds`; rollouts of
both kinds alternate. No rollout can be faster than the larger of decoding alone and the longest chain of tool times in
one answer. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from paceline.config import Config, load_config
from paceline.core import Group
from paceline.loop import TrainLoop
from paceline.observe.clock import Clock
from paceline.run import Run

HERE = Path(__file__).parent
MOST = 1.15  # times the larger of the two, which a rollout may take


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a tool call")
    parser.add_argument("--calls", type=int, default=2, help="in a row, of an answer that calls the tool")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4, help="answers to each")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def make(options: argparse.Namespace, folder: Path, seconds: float) -> TrainLoop:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = [
        f"run_dir={folder}",
        "steps=1000",
        "task.difficulty=medium",
        f"model.device={device}",
        f"model.dtype={'bfloat16' if device == 'cuda' else 'float64'}",
        f"rollout.prompts={options.prompts}",
        f"rollout.samples={options.samples}",
        f"rollout.max_tokens={options.max_tokens}",
        f"rollout.max_batch={options.max_batch}",
        f"cluster.workers={options.workers}",
        f"environment.name={HERE / 'tool_environment.py'}:Waiting",
        f"environment.options={{seconds: {seconds}, calls: {options.calls}}}",
        "environment.workers=2",
        "environment.log_turns=false",
        "reward.functions=[{function: countdown}]",
        "speculation.mode=plain",  # the tuner's trials are not what is measured
        "log.tensorboard=false",
    ]
    config: Config = load_config(None, words)
    run = Run.create(config)
    return TrainLoop(run.config, run)


def roll_out(loop: TrainLoop) -> tuple[float, list[Group], dict[str, float]]:
    """The first step's rollout, again and again: seconds, groups, and what conversations were like."""
    started = time.perf_counter()
    groups = loop._rollout(range(loop.config.rollout.prompts), Clock(lambda part, seconds: None, lambda part: None))
    seconds = time.perf_counter() - started
    return seconds, groups, loop.finished.metrics()


def tokens_of(groups: list[Group]) -> dict[int, list[int]]:
    return {i: completion.tokens for group in groups for i, completion in group.completions.items()}


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        loops = {
            "alone": make(options, Path(scratch) / "alone", 0.0),
            "waiting": make(options, Path(scratch) / "waiting", options.seconds),
        }
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        chains: list[float] = []
        seen: dict[str, dict[int, list[int]]] = {}
        turns = calls = tokens = 0.0
        try:
            for repeat in range(options.repeats + 1):
                for name, loop in loops.items():
                    took, groups, metrics = roll_out(loop)
                    seen[name] = tokens_of(groups)
                    if repeat == 0:  # processes and memory warm up
                        continue
                    seconds[name].append(took)
                    turns = metrics["acting/turns/mean"]
                    if name == "waiting":
                        chains.append(metrics["acting/longest_tool_s"])
                        calls = metrics["acting/tool_s"] / options.seconds
                    tokens = float(sum(map(len, seen[name].values())))
                    print(f"{name:8} {took:6.2f} s, {turns:.2f} turns per answer", flush=True)
        finally:
            for loop in loops.values():
                loop.close()
    same = seen["alone"] == seen["waiting"]
    chain = max(chains)
    answers = options.prompts * options.samples
    print(f"{answers} answers, {tokens:,.0f} tokens, {calls:.0f} calls of {options.seconds:g} s; same tokens: {same}")
    result: dict[str, float] = {"chain_s": chain, "calls": calls}
    # What else a machine does only adds: the fastest of several rollouts is the least disturbed one.
    for how, pick in (("median", statistics.median), ("fastest", min)):
        alone, waiting = pick(seconds["alone"]), pick(seconds["waiting"])
        least = max(alone, chain)
        print(
            f"{how}: decoding alone {alone:.2f} s, with tools {waiting:.2f} s, {waiting / least:.3f} times the larger "
            f"of that and the longest chain of tool times, {chain:.2f} s (at most {MOST}); one after the other it "
            f"would be {alone + calls * options.seconds:.1f} s"
        )
        result |= {f"alone_s/{how}": alone, f"waiting_s/{how}": waiting, f"ratio/{how}": waiting / least}
    print(json.dumps({key: round(value, 4) for key, value in result.items()} | {"same_tokens": same}))


if __name__ == "__main__":
    main()
