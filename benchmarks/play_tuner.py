"""What the tuner makes of rollouts with a long tail, played with measured costs and without a GPU.

    python benchmarks/play_tuner.py --costs benchmarks/results/roofline-7b-wide-h200.txt --capture-ms 160

A round takes what roofline.py has measured for its batch size and strategy, a capture more when both meet for the first
time, and passes of a drafter that did not run for a while more. Guesses hold by chance, for some texts more often than
for others (--spread), and less often at the beginning of a text. Each step's answers are written plainly, by the tuner,
and by one that knows all costs and chances and needs neither captures nor to catch up; the first step is left out, as
in rl_step.py, and so is it in the table by how many texts ran at once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.draft.eagle.drafting import entries_at_once, entries_in_reach
from paceline.draft.eagle.vocabulary import GUESSABLE
from paceline.draft.pace import Pace, rates
from paceline.draft.strategy import NEURAL, PLAIN, Strategy, default_strategies
from paceline.draft.tuner import Prospect, Tuner, sizes

MOST, LONGEST = 128, 4096
GUESSES, CONTEXT = 6, 2048  # of the rounds of guesses that roofline.py measures, and of all its passes but one
LONG_BATCH = 8  # of that one, whose context is longer
TREE = 1.4  # times a chain's guess: what a level of a tree took in speculate-7b-h200.txt
HOST_MS = 0.1  # of guesses from suffixes
HOLDS = {"suffix": 0.45, "neural": 0.87, "neural x3": 0.92, "neural x4": 0.935}  # as often as in that file
DEEPER = 0.005  # less for every level
EARLY, EARLY_LESS = 150, 0.1  # tokens at the beginning of a text, and how much less often guesses hold there
STEP, WINDOW = 11, 256  # of a drafter that catches up: entries that a round leaves behind, and that it looks back on
PASS_S, ROW_S = 2e-3, 1.3e-6  # what one takes: waiting for the host, and computing
SWITCH_S = 5e-4  # of a round that another drafter's had to land before
KEEPING = 1.007  # times a plain round: what keeping a drafter ready takes

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
    """Milliseconds of passes: plain by batch, checks by tokens, guesses by batch; less for each text by so many."""

    plain: Curve
    checks: Curve
    guess: Curve
    less: float = 0.0

    @classmethod
    def of(cls, rows: list[dict[str, Any]], context: int = CONTEXT) -> Machine:
        """From what roofline.py printed, for texts of about this length."""
        less = 0.0
        if context != CONTEXT:
            ends = sorted((r["context"], r["ms"]) for r in rows if r["pass"] == "decode" and r["batch"] == LONG_BATCH)
            (short, low), (long, high) = ends[0], ends[-1]
            less = (CONTEXT - context) * (high - low) / (long - short) / LONG_BATCH
        rows = [r for r in rows if r["context"] == CONTEXT]
        plain = sorted((r["batch"], r["ms"]) for r in rows if r["pass"] == "decode")
        checks: dict[int, list[float]] = {}
        for r in rows:
            name = r["pass"].split()
            if name[0] == "verify" and name[-1] == "tokens":
                checks.setdefault(r["batch"] * int(name[1]), []).append(r["ms"])
        drafts = [r for r in rows if r["pass"].startswith(f"draft {GUESSES}, {GUESSABLE}, ")]
        guess = sorted((r["batch"], r["ms"] / GUESSES) for r in drafts)
        return cls(plain, sorted((tokens, fmean(ms)) for tokens, ms in checks.items()), guess, less)

    def seconds(self, batch: int, s: Strategy) -> float:
        plain = between(self.plain, batch)
        if s.plain:
            return (plain - batch * self.less) / 1e3
        draft = HOST_MS if s.drafter != NEURAL else s.depth * between(self.guess, batch) * (1 if s.chain else TREE)
        return (max(plain, between(self.checks, batch * s.places)) + draft - batch * self.less) / 1e3


@functools.cache
def holds(s: Strategy, level: int, ease: float = 0.0) -> float:
    often = HOLDS[s.drafter if s.chain or s.drafter != NEURAL else f"{NEURAL} x{s.width}"]
    return min(0.99, max(0.0, often - DEEPER * level + ease))


@functools.cache
def tokens(s: Strategy, ease: float) -> float:
    total = alive = 1.0
    for level in range(s.depth):
        alive *= holds(s, level, ease)
        total += alive
    return total


def lengths(dice: random.Random, flat: int | None = None, prompts: int = 16, samples: int = 8) -> list[int]:
    """All `flat`, or like those of `task.difficulty=tail`: of 16 problems 14 are quick, one is hard and one hardly ever
    solved."""
    if flat:
        return [flat] * (prompts * samples)
    found = []
    for _ in range(prompts):
        middle, spread = dice.choices([(85, 0.7), (600, 0.8), (3500, 0.6)], [14, 1, 1])[0]
        found += [min(LONGEST, max(8, int(middle * math.exp(dice.gauss(0, spread))))) for _ in range(samples)]
    return found


@dataclass
class Text:
    left: int
    ease: float  # how much more often guesses hold than for others
    written: int = 0
    lag: int = 1  # tokens that the neural drafter has not seen
    pace: Pace = field(default_factory=Pace)

    @property
    def chance(self) -> float:
        return round(self.ease - EARLY_LESS * (self.written < EARLY), 2)

    def write(self, count: int, s: Strategy) -> None:
        self.left, self.written = self.left - count, self.written + count
        self.lag = count + (0 if s.drafter == NEURAL else self.lag)
        if not s.plain:
            self.pace.add(count - 1, s.depth)


@dataclass
class Play:
    machine: Machine
    capture_s: float
    dice: random.Random
    longest: int = LONGEST
    captured: set[tuple[Any, ...]] = field(default_factory=set)
    capturing_s: float = 0.0
    texts: list[Text] = field(default_factory=list)
    by_texts: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def rollout(self, texts: list[Text], choose: Callable[[int], Strategy], tuner: Tuner | None = None) -> float:
        """Seconds until all answers are written; captures and catching up are for those who have a tuner."""
        total, last, self.texts = 0.0, PLAIN, texts
        while self.texts:
            batch, size = len(self.texts), self._size()
            s = choose(batch)
            exploring = tuner is not None and tuner.exploring
            accepted = [self._accepted(s, text.chance) for text in self.texts]
            seconds = self.machine.seconds(size, s) * self.dice.uniform(0.98, 1.05)
            if tuner is not None:
                seconds = seconds * (KEEPING if s.plain else 1.0) + SWITCH_S * (s.drafter != last.drafter)
                last = s
                capture_s, rows = self._capture(size, s), self._missed() if s.drafter == NEURAL else 0
                seconds += capture_s + self._catching_up(rows, size)
                warm, made_up = not (capture_s or rows), 0 if capture_s else rows
                tuner.observe(batch, s, seconds, None if s.plain else accepted, warm, made_up, exploring)
                self.by_texts[1 << (batch - 1).bit_length()][s.drafter] += seconds
            total += seconds
            for text, held in zip(self.texts, accepted, strict=True):
                text.write(1 + held, s)
            if tuner is not None:
                tuner.ended(text.written for text in self.texts if text.left <= 0)
            self.texts = [text for text in self.texts if text.left > 0]
        return total

    def prospect(self) -> Prospect:
        if not self.texts:
            return Prospect()
        left = fmean(self.longest - text.written for text in self.texts)
        return Prospect(left, {NEURAL: self._missed()}, rates([text.pace for text in self.texts]))

    def knows(self, strategies: list[Strategy]) -> Strategy:
        """The best one for the texts that run."""
        size, chances = self._size(), Counter(text.chance for text in self.texts)
        fitting = [s for s in strategies if s.fits(len(self.texts))]
        expected = lambda s: sum(n * tokens(s, chance) for chance, n in chances.items())  # noqa: E731
        return max(fitting, key=lambda s: expected(s) / self.machine.seconds(size, s))

    def _size(self) -> int:
        ladder = sizes(MOST)
        return ladder[bisect_left(ladder, len(self.texts))]

    def _accepted(self, s: Strategy, ease: float) -> int:
        level = 0
        while level < s.depth and self.dice.random() < holds(s, level, ease):
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

    def _missed(self) -> int:
        """Rows of the passes that the drafter has to make first, as `rollout.runner` counts them."""
        size, reach = self._size(), entries_in_reach(len(self.texts), WINDOW, on_gpu=True)
        missing, most = min(reach, max(text.lag for text in self.texts)), entries_at_once(size, STEP, WINDOW)
        return size * most * -(-max(0, missing - STEP) // most)

    def _catching_up(self, rows: int, size: int) -> float:
        passes = rows / (size * entries_at_once(size, STEP, WINDOW))
        return passes * PASS_S * self.dice.uniform(0.9, 1.3) + rows * ROW_S


def play(machine: Machine, capture_s: float, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    strategies = default_strategies(["suffix", NEURAL])
    game = Play(machine, capture_s, random.Random(seed), args.flat or LONGEST)
    tuner = Tuner(strategies, MOST, args.explore, game.prospect)
    rows: list[dict[str, float]] = []
    for step in range(args.steps + 1):
        dice, before = random.Random(f"{seed} {step}"), game.capturing_s
        ease = args.holds - HOLDS[NEURAL]
        drawn = [(n, ease + dice.gauss(0.0, args.spread)) for n in lengths(dice, args.flat)]
        texts = lambda drawn=drawn: [Text(*one) for one in drawn]  # noqa: E731
        row = {"plain_s": game.rollout(texts(), lambda _: PLAIN)}
        row["adaptive_s"] = game.rollout(texts(), tuner.choose, tuner)
        row["best_s"] = game.rollout(texts(), lambda _: game.knows(strategies))
        rows.append(row | {"capturing_s": game.capturing_s - before})
        if step == 0:
            game.by_texts.clear()
    late = rows[1:]
    sums = {name: sum(r[name] for r in late) for name in rows[0]}
    return {
        "speedup": sums["plain_s"] / sums["adaptive_s"],
        "median": median(r["plain_s"] / r["adaptive_s"] for r in late),
        "of_best": sums["best_s"] / sums["adaptive_s"],
        "captures": len(game.captured),
        "capturing_s": sums["capturing_s"] / args.steps,
        "first_s": rows[0]["capturing_s"],
        "explored": tuner.explored / tuner.seconds,
        "by_texts": game.by_texts,
    }


def plain_shares(played: list[dict[str, Any]], steps: int) -> list[dict[str, float]]:
    """Of every step, by how many texts ran at once: seconds, and the share of plain decoding."""
    rows = []
    for most in sorted({most for p in played for most in p["by_texts"]}):
        spent = sum((p["by_texts"][most] for p in played), Counter())
        total = sum(spent.values())
        row = {"up_to": most, "seconds": total / steps / len(played), "plain": spent[PLAIN.drafter] / total}
        rows.append({name: round(value, 3) for name, value in row.items()})
    return rows


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, required=True, help="what roofline.py printed, with its line of JSON")
    parser.add_argument("--capture-ms", default="0,50,160", help="of one graph")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--explore", type=float, default=0.02)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--spread", type=float, default=0.15, help="of how often guesses hold, between texts")
    parser.add_argument(
        "--holds", type=float, default=HOLDS[NEURAL], help="how often neural guesses do; others too, by as much"
    )
    parser.add_argument("--context", type=int, default=CONTEXT, help="that rounds are made with, on average")
    parser.add_argument("--flat", type=int, metavar="TOKENS", help="all answers have this length")
    args = parser.parse_args(argv)
    machine = Machine.of(json.loads(args.costs.read_text().splitlines()[-1])["rows"], args.context)
    print("capture   rollouts  of the best  graphs  capturing: first step  later ones  explored")
    rows = []
    for ms in [float(x) for x in args.capture_ms.split(",")]:
        played = [play(machine, ms / 1e3, args, seed) for seed in range(args.repeat)]
        row = {name: round(fmean(p[name] for p in played), 4) for name in played[0] if name != "by_texts"}
        rows.append({"capture_ms": ms} | row | {"by_texts": plain_shares(played, args.steps)})
        captures = f"{row['captures']:>7.0f} {row['first_s']:>20.1f} s {row['capturing_s']:>9.2f} s"
        print(f"{ms:>4.0f} ms {row['speedup']:>6.2f} times {row['of_best']:>12.0%} {captures} {row['explored']:>9.1%}")
    print(f"\ntexts     seconds  plain   (captures of {rows[-1]['capture_ms']:.0f} ms)")
    for one in rows[-1]["by_texts"]:
        print(f"up to {one['up_to']:<4} {one['seconds']:>5.2f} s  {one['plain']:>5.0%}")
    settings = {name: value for name, value in vars(args).items() if name not in ("costs", "capture_ms")}
    result = settings | {"rows": rows}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
