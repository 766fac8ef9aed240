"""The simulator against the node table that TLT publishes, and what more GPUs would give with each technique. No GPU.

    python benchmarks/simulate_nodes.py

Published (TLT, ASPLOS 2026; 7B on nodes of 8 H100, against verl): whole steps 1.21, 1.45, 1.62 and 1.76 times faster
on 1, 2, 4 and 8 nodes; one stream 165 -> 430 tokens/s; speed-up by batch size (32B) 3.62, 3.39, 3.13, 2.73, 2.67,
2.48 at 1, 2, 4, 8, 16, 32. From these follow the seconds of rounds: the 7B's speed-ups are the 32B's in proportion to
the single stream, and larger batches decode plainly. How a plain round grows with its batch is that of an H200 with
the same model. Lengths are log-normal up to 32,768 tokens, those of a group alike. What the paper's table leaves open
is chosen, not measured: requests a step, median and spread of lengths, what an update takes beyond its arithmetic.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from statistics import fmean
from typing import Any

from paceline.simulate.costs import BatchCurve, StepCosts, StepWork
from paceline.simulate.idle import Coupling
from paceline.simulate.simulator import STAGES, Simulator

PUBLISHED = {1: 1.21, 2: 1.45, 4: 1.62, 8: 1.76}  # by nodes
GPUS_PER_NODE = 8
STREAM = (165.0, 430.0)  # tokens/s of one stream, plain and speculating
SPEEDUPS = {1: 3.62, 2: 3.39, 4: 3.13, 8: 2.73, 16: 2.67, 32: 2.48}  # of the 32B, by batch size
PLAIN_GROWTH = {1: 3.83, 8: 4.28, 32: 5.21, 128: 9.06}  # ms of a plain round of a 7B on an H200
PARAMETERS = 7.6e9
PEAK_FLOP_S, USED = 989e12, 0.4  # of an H100 in bfloat16, and the share of it that an update reaches
FORWARD_AGAIN = 4 / 3  # forward, backward, and a forward pass for the old policy's probabilities
MAX_TOKENS, PROMPT, GROUP, SLOTS = 32768, 200, 16, 256
UPDATE_S = 15.0  # of a step beyond arithmetic: weights to the rollout engine, rewards, logging; chosen
TOKENS_PER_FLIP = 4300.0  # where rounding in bfloat16 alone makes one (field measurements of the engine on an H200)


def costs() -> StepCosts:
    plain = BatchCurve.of([(batch, ms / PLAIN_GROWTH[1] / STREAM[0]) for batch, ms in PLAIN_GROWTH.items()])
    smaller = (STREAM[1] / STREAM[0] - 1) / (SPEEDUPS[1] - 1)
    adaptive = [(float(b), plain.at(b) / (1 + (speedup - 1) * smaller)) for b, speedup in SPEEDUPS.items()]
    adaptive += [(float(b), plain.at(b)) for b in (max(SPEEDUPS) + 1, 64, 128)]
    token_s = 6 * PARAMETERS * FORWARD_AGAIN / (USED * PEAK_FLOP_S)
    return StepCosts(plain, BatchCurve.of(adaptive), prefill_s=0.02, gradient_token_s=token_s, update_s=UPDATE_S)


def work(requests: int, median: float, spread: float, seed: int) -> StepWork:
    dice = random.Random(seed)
    lengths: list[int] = []
    for _ in range(requests // GROUP):
        group = math.log(median) + dice.gauss(0, 0.8 * spread)
        alike = (math.exp(group + dice.gauss(0, 0.6 * spread)) for _ in range(GROUP))
        lengths += [int(min(MAX_TOKENS, max(50.0, tokens))) for tokens in alike]
    return StepWork(tuple(lengths), GROUP, sum(lengths) + PROMPT * requests, PROMPT)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024, help="of a step, on 1 to 8 nodes")
    parser.add_argument("--median", type=float, default=3000.0, help="tokens of a completion")
    parser.add_argument("--spread", type=float, default=1.2, help="standard deviation of their logarithm")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--gpus", default="8,64,1024", help="with 16 requests each, for the second table")
    return parser


def nodes(simulator: Simulator, args: argparse.Namespace) -> list[dict[str, Any]]:
    steps = [work(args.requests, args.median, args.spread, seed) for seed in range(args.steps)]
    mean = fmean(n for step in steps for n in step.lengths)
    print(f"{args.requests} requests a step, {mean:,.0f} tokens on average, {args.steps} steps")
    print("nodes   published   simulated    off   rollout's share of a plain step")
    rows = []
    for count, published in PUBLISHED.items():
        workers = count * GPUS_PER_NODE
        plain = simulator.run(steps, workers, STAGES["plain decoding"])
        found = plain.step_s / simulator.run(steps, workers, STAGES["speculation"]).step_s
        share = plain.rollout_s / plain.step_s
        rows.append({"nodes": count, "published": published, "simulated": round(found, 3), "rollout": round(share, 3)})
        print(f"{count:>5}{published:>12.2f}{found:>12.2f}{found / published - 1:>7.0%}{share:>10.0%}", flush=True)
    return rows


def techniques(simulator: Simulator, args: argparse.Namespace) -> list[dict[str, Any]]:
    print("\n GPUs   technique                     step s   nothing to decode    idle   times plain")
    rows = []
    for gpus in map(int, args.gpus.split(",")):
        steps = [work(GROUP * gpus, args.median, args.spread, seed) for seed in range(2 if gpus > 100 else args.steps)]
        plain_s = 0.0
        for name, some in STAGES.items():
            step = simulator.run(steps, gpus, some)
            plain_s = plain_s or step.step_s
            rows.append({"gpus": gpus, "technique": name, "step_s": round(step.step_s, 2), "dry": round(step.dry, 4)})
            rows[-1] |= {"idle": round(step.idle, 4), "times_plain": round(plain_s / step.step_s, 3)}
            print(
                f"{gpus:>5}   {name:<26}{step.step_s:>10.1f}{step.dry:>20.1%}{step.idle:>8.1%}"
                f"{plain_s / step.step_s:>14.2f}",
                flush=True,
            )
    return rows


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = arguments().parse_args(argv)
    simulator = Simulator(costs(), SLOTS, MAX_TOKENS, Coupling(TOKENS_PER_FLIP))
    result = {"settings": vars(args), "nodes": nodes(simulator, args), "techniques": techniques(simulator, args)}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
