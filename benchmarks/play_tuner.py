"""What the tuner makes of rollouts with a long tail, played with measured costs and without a GPU.

    python benchmarks/play_tuner.py --costs benchmarks/results/roofline-7b-wide-h200.txt --capture-ms 160

A round takes what roofline.py has measured for its batch size and strategy, and a capture more when both meet for the
first time. Guesses hold by chance. Each step's answers are written plainly, by the tuner, and by one that knows all
costs and chances and needs no captures; the first step is left out, as in rl_step.py. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.draft.strategy import NEURAL, PLAIN, Strategy, default_strategies
from paceline.draft.tuner import Tuner, sizes

MOST, LONGEST = 128, 4096
GUESSES, CONTEXT = 6, 2048  # of the rounds of guesses that roofline.py measures, and of all its passes but one
TREE = 1.4  # times a chain's guess: what a level of a tree took in speculate-7b-h200.txt
HOST_MS = 0.1  # of guesses from suffixes
HOLDS = {"suffix": 0.45, "neural": 0.87, "neural x3": 0.92, "neural x4": 0.935}  # as often as in that file
DEEPER = 0.005  # less for every level

Curve = list[tuple[float, float]]


def between(curve: Curve, x: float) -> float:
    """On the line between its neighbours, by the logarithm of x; beyond the last in proportion."""
    i = bisect_left([at for at, _ in curve], x)
    if i == len(curve):
        return curve[-1][1] * x / curve[-1][0]
    if i == 0 or curve[i][0] == x:
        return curve[i][1]
    (a, low), (b, high) = curve[i - 1], curve[i]
    return low + (high - low) * math.log(x / a) / math.log(b / a)


@dataclass
class Machine:
    """Milliseconds of passes: plain by batch, checks by tokens, guesses by batch."""

    plain: Curve
    checks: Curve
    guess: Curve

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> Machine:
        """From what roofline.py printed."""
        rows = [r for r in rows if r["context"] == CONTEXT]
        plain = sorted((r["batch"], r["ms"]) for r in rows if r["pass"] == "decode")
        checks: dict[int, list[float]] = {}
        for r in rows:
            name = r["pass"].split()
            if name[0] == "verify" and name[-1] == "tokens":
                checks.setdefault(r["batch"] * int(name[1]), []).append(r["ms"])
        drafts = [r for r in rows if r["pass"].startswith(f"draft {GUESSES}, ") and "full" not in r["pass"]]
        guess = sorted((r["batch"], r["ms"] / GUESSES) for r in drafts)
        return cls(plain, sorted((tokens, fmean(ms)) for tokens, ms in checks.items()), guess)

    def seconds(self, batch: int, s: Strategy) -> float:
        plain = between(self.plain, batch)
        if s.plain:
            return plain / 1e3
        draft = HOST_MS if s.drafter != NEURAL else s.depth * between(self.guess, batch) * (1 if s.chain else TREE)
        return (max(plain, between(self.checks, batch * s.places)) + draft) / 1e3


def holds(s: Strategy, level: int) -> float:
    return HOLDS[s.drafter if s.chain or s.drafter != NEURAL else f"{NEURAL} x{s.width}"] - DEEPER * level


def tokens(s: Strategy) -> float:
    total = alive = 1.0
    for level in range(s.depth):
        alive *= holds(s, level)
        total += alive
    return total


def lengths(dice: random.Random, prompts: int = 16, samples: int = 8) -> list[int]:
    """Like those of `task.difficulty=tail`: of 16 problems 14 are quick, one is hard and one hardly ever solved."""
    found = []
    for _ in range(prompts):
        middle, spread = dice.choices([(85, 0.7), (600, 0.8), (3500, 0.6)], [14, 1, 1])[0]
        found += [min(LONGEST, max(8, int(middle * math.exp(dice.gauss(0, spread))))) for _ in range(samples)]
    return found


@dataclass
class Play:
    machine: Machine
    capture_s: float
    dice: random.Random
    captured: set[tuple[Any, ...]] = field(default_factory=set)
    capturing_s: float = 0.0

    def rollout(self, left: list[int], choose: Callable[[int], Strategy], tuner: Tuner | None = None) -> float:
        """Seconds until all answers are written; captures are for those who have a tuner."""
        total, ladder = 0.0, sizes(MOST)
        while left:
            s, size = choose(len(left)), ladder[bisect_left(ladder, len(left))]
            exploring = tuner is not None and tuner.exploring
            accepted = [self._accepted(s) for _ in left]
            seconds = self.machine.seconds(size, s) * self.dice.uniform(0.98, 1.05)
            if tuner is not None:
                more = self._capture(size, s)
                seconds += more
                tuner.observe(len(left), s, seconds, None if s.plain else accepted, not more, exploring=exploring)
            total += seconds
            left = [n - 1 - held for n, held in zip(left, accepted, strict=True) if n - 1 - held > 0]
        return total

    def _accepted(self, s: Strategy) -> int:
        level = 0
        while level < s.depth and self.dice.random() < holds(s, level):
            level += 1
        return level

    def _capture(self, size: int, s: Strategy) -> float:
        """As the runner does it: a graph to guess with, and one to check with whoever guessed."""
        keys: set[tuple[Any, ...]] = {("check", size, s.nodes, s.depth, s.chain)}
        if s.drafter == NEURAL:
            keys.add(("guess", size, s))
        seconds = len(keys - self.captured) * self.capture_s
        self.captured |= keys
        self.capturing_s += seconds
        return seconds


def play(machine: Machine, capture_s: float, steps: int, explore: float, seed: int) -> dict[str, Any]:
    strategies = default_strategies(["suffix", NEURAL])
    tuner = Tuner(strategies, MOST, explore)
    game = Play(machine, capture_s, random.Random(seed))
    knows = lambda n: max((s for s in strategies if s.fits(n)), key=lambda s: tokens(s) / machine.seconds(n, s))  # noqa: E731
    rows: list[dict[str, float]] = []
    for step in range(steps + 1):
        left, before = lengths(random.Random(f"{seed} {step}")), game.capturing_s
        row = {"plain_s": game.rollout(left, lambda _: PLAIN), "adaptive_s": game.rollout(left, tuner.choose, tuner)}
        rows.append(row | {"best_s": game.rollout(left, knows), "capturing_s": game.capturing_s - before})
    late = rows[1:]
    sums = {name: sum(r[name] for r in late) for name in rows[0]}
    return {
        "speedup": sums["plain_s"] / sums["adaptive_s"],
        "median": median(r["plain_s"] / r["adaptive_s"] for r in late),
        "of_best": sums["best_s"] / sums["adaptive_s"],
        "captures": len(game.captured),
        "capturing_s": sums["capturing_s"] / steps,
        "first_s": rows[0]["capturing_s"],
        "explored": tuner.explored / tuner.seconds,
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, required=True, help="what roofline.py printed, with its line of JSON")
    parser.add_argument("--capture-ms", default="0,50,160", help="of one graph")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--explore", type=float, default=0.02)
    parser.add_argument("--repeat", type=int, default=4)
    args = parser.parse_args(argv)
    machine = Machine.of(json.loads(args.costs.read_text().splitlines()[-1])["rows"])
    print("capture   rollouts  of the best  graphs  capturing: first step  later ones  explored")
    rows = []
    for ms in [float(x) for x in args.capture_ms.split(",")]:
        played = [play(machine, ms / 1e3, args.steps, args.explore, seed) for seed in range(args.repeat)]
        row = {name: round(fmean(p[name] for p in played), 4) for name in played[0]}
        rows.append({"capture_ms": ms} | row)
        captures = f"{row['captures']:>7.0f} {row['first_s']:>20.1f} s {row['capturing_s']:>9.2f} s"
        print(f"{ms:>4.0f} ms {row['speedup']:>6.2f} times {row['of_best']:>12.0%} {captures} {row['explored']:>9.1%}")
    result = {"steps": args.steps, "repeat": args.repeat, "explore": args.explore, "rows": rows}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
