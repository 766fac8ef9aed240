"""The tuner against the best in hindsight: simulated rollouts with measured costs, without a GPU.

    python benchmarks/play_tuner.py --costs benchmarks/results/roofline-7b-wide-h200.txt

A round takes what roofline.py has measured for its batch size and strategy; keeping a drafter ready, switching drafters
and the passes of a drafter that did not run for a while come on top. Draft tokens are accepted at random: more often in
some sequences than in others (normal with the case's `spread`), and less often at the beginning of a sequence. Every
step's sequences are decoded plainly, by the tuner, and by policies that know all costs and acceptance probabilities and
pay for neither switches nor catch-up passes; the fastest of those over a whole case is the best in hindsight. The first
step, in which the tuner knows nothing, is left out. Means over --seeds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.draft.acceptance import FADE
from paceline.draft.decision import BatchContext, RoundOutcome
from paceline.draft.eagle.drafter import EagleDrafter, entries_at_once, entries_in_reach
from paceline.draft.eagle.vocabulary import DRAFT_VOCAB
from paceline.draft.ladder import batch_ladder, bucket
from paceline.draft.registry import default_strategies
from paceline.draft.stragglers import slowest
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.tuner import Tuner

MAX_BATCH = 128
MAX_TOKENS = 4096
DRAFT_TOKENS, CONTEXT = 6, 2048  # of the rounds that roofline.py measures, and of all its passes but one
LONG_BATCH = 8  # of that one, whose context is longer
TREE = 1.4  # cost of drafting a level of a tree over one of a chain, as in speculate-7b-h200.txt
HOST_MS = 0.1  # of drafting from suffixes
NEURAL = EagleDrafter.name
ACCEPT = {"suffix": 0.45, "neural": 0.87, "neural x3": 0.92, "neural x4": 0.935}  # acceptance per level in that file
DEEPER = 0.005  # less for every level
EARLY, EARLY_LESS = 150, 0.1  # tokens at the beginning of a sequence, and how much lower acceptance is there
STEP, WINDOW = 11, 256  # of a drafter that catches up: entries that a round leaves behind, and that it looks back on
PASS_S, ROW_S = 2e-3, 1.3e-6  # cost of a catch-up pass: waiting for the host, and computing each row
SWITCH_S = 5e-4  # cost of a round whose drafter is another one than the last round's
KEEPING = 1.007  # times a plain round: what keeping a drafter ready takes
NOISE = (0.98, 1.05)  # a round takes its cost times a uniform draw from this range
DECIDE_EVERY = 4  # rounds for which an informed policy keeps its decision
LADDER = batch_ladder(MAX_BATCH)
STRATEGIES = default_strategies(["suffix", NEURAL])

Curve = list[tuple[float, float]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    accept: float = ACCEPT[NEURAL]
    """Acceptance of the first draft token of a neural chain; that of other drafters shifts by as much."""
    spread: float = 0.15
    """Standard deviation of acceptance between sequences."""
    flat: int | None = None
    """All completions have this length; otherwise a long tail."""
    context: int = CONTEXT
    """Mean context that rounds are made with."""
    catch_up: float = 1.0
    """Times what catch-up passes take."""
    bad_steps: tuple[int, int] = (0, 0)
    """From the first of these steps up to the second the neural drafter's acceptance is 0.6 lower."""


CASES = {
    "tail": Case(),
    "tail-alike": Case(spread=0.0),
    "tail-mixed": Case(spread=0.4),
    "tail-weak": Case(accept=0.72),
    "tail-strong": Case(accept=0.93),
    "tail-drift": Case(bad_steps=(4, 8)),
    "flat": Case(flat=384, context=250),
    "flat-mixed": Case(flat=384, context=250, spread=0.4),
    "flat-behind": Case(flat=384, context=250, spread=0.4, catch_up=10.0),
    "flat-weak": Case(flat=384, context=250, accept=0.72),
    "flat-strong": Case(flat=384, context=250, accept=0.93),
}


def between(curve: Curve, x: float) -> float:
    """On the line between its neighbours, by the logarithm of x; beyond the last in proportion."""
    i = bisect_left([at for at, _ in curve], x)
    if i == len(curve):
        return curve[-1][1] * x / curve[-1][0]
    if i == 0 or curve[i][0] == x:
        return curve[i][1]
    (a, low), (b, high) = curve[i - 1], curve[i]
    return low + (high - low) * math.log(x / a) / math.log(b / a)


class Machine:
    """Seconds of rounds, from milliseconds of passes: plain ones by batch size, verification by tokens, drafting by
    batch size; `less` is what each sequence saves because its context is shorter than the measured one."""

    def __init__(self, plain: Curve, verify: Curve, draft: Curve, less: float = 0.0):
        self.plain = plain
        self.verify = verify
        self.draft = draft
        self.less = less
        self.seconds = functools.cache(self._seconds)

    @classmethod
    def of(cls, rows: list[dict[str, Any]], context: int = CONTEXT) -> Machine:
        """From what roofline.py printed, for sequences of about this length."""
        less = 0.0
        if context != CONTEXT:
            ends = sorted((r["context"], r["ms"]) for r in rows if r["pass"] == "decode" and r["batch"] == LONG_BATCH)
            (short, low), (long, high) = ends[0], ends[-1]
            less = (CONTEXT - context) * (high - low) / (long - short) / LONG_BATCH
        rows = [r for r in rows if r["context"] == CONTEXT]
        plain = sorted((r["batch"], r["ms"]) for r in rows if r["pass"] == "decode")
        verify: dict[int, list[float]] = {}
        for r in rows:
            name = r["pass"].split()
            if name[0] == "verify" and name[-1] == "tokens":
                verify.setdefault(r["batch"] * int(name[1]), []).append(r["ms"])
        drafts = [r for r in rows if r["pass"].startswith(f"draft {DRAFT_TOKENS}, {DRAFT_VOCAB}, ")]
        draft = sorted((r["batch"], r["ms"] / DRAFT_TOKENS) for r in drafts)
        return cls(plain, sorted((tokens, fmean(ms)) for tokens, ms in verify.items()), draft, less)

    def _seconds(self, batch: int, s: Strategy) -> float:
        plain = between(self.plain, batch)
        if s.plain:
            return (plain - batch * self.less) / 1e3
        draft = HOST_MS if s.drafter != NEURAL else s.depth * between(self.draft, batch) * (1 if s.chain else TREE)
        return (max(plain, between(self.verify, batch * s.num_verified)) + draft - batch * self.less) / 1e3


@functools.cache
def acceptance(s: Strategy) -> Floats:
    """Probability by level that a draft token is accepted if those above it were, in a sequence of mean ease."""
    first = ACCEPT[s.drafter if s.chain or s.drafter != NEURAL else f"{NEURAL} x{s.width}"] if not s.plain else 0.0
    return first - DEEPER * np.arange(s.depth)


def lengths(dice: random.Random, flat: int | None, prompts: int = 16, samples: int = 8) -> list[int]:
    """All `flat`, or like those of `task.difficulty=tail`: of 16 problems 14 are quick, one is hard and one hardly ever
    solved."""
    if flat:
        return [flat] * (prompts * samples)
    found = []
    for _ in range(prompts):
        middle, spread = dice.choices([(85, 0.7), (600, 0.8), (3500, 0.6)], [14, 1, 1])[0]
        found += [min(MAX_TOKENS, max(8, int(middle * math.exp(dice.gauss(0, spread))))) for _ in range(samples)]
    return found


class Batch:
    """The sequences that still run, by row."""

    def __init__(self, lengths: list[int], ease: list[float], neural: float):
        self.left = np.array(lengths)
        self.ease = np.array(ease)  # how much higher acceptance is than in others
        self.neural = neural  # how much higher it is for the neural drafter at present
        self.written = np.zeros_like(self.left)
        self.lag = np.ones_like(self.left)  # tokens that the neural drafter has not seen
        self.reached = np.zeros(len(lengths))  # as `rollout.rows` counts them
        self.accepted = np.zeros(len(lengths))

    def __len__(self) -> int:
        return len(self.left)

    @property
    def size(self) -> int:
        return bucket(LADDER, len(self))

    def probabilities(self, s: Strategy) -> Floats:
        """Of acceptance, by sequence and level."""
        ease = self.ease - EARLY_LESS * (self.written < EARLY) + (self.neural if s.drafter == NEURAL else 0.0)
        return np.clip(acceptance(s) + ease[:, None], 0.0, 0.99)

    def expected(self, s: Strategy) -> Floats:
        """Accept length of each sequence."""
        return 1.0 + np.cumprod(self.probabilities(s), 1).sum(1)

    def draw(self, s: Strategy, rng: np.random.Generator) -> NDArray[np.int64]:
        """Accepted draft tokens of each sequence."""
        if s.plain:
            return np.zeros_like(self.left)
        accepted = rng.random((len(self), s.depth)) < self.probabilities(s)
        found: NDArray[np.int64] = np.logical_and.accumulate(accepted, 1).sum(1)
        return found

    def write(self, counts: NDArray[np.int64], s: Strategy) -> list[int]:
        """Append so many tokens to each -> lengths of those that have ended."""
        self.left = self.left - counts
        self.written = self.written + counts
        self.lag = counts if s.drafter == NEURAL else self.lag + counts
        if not s.plain:
            self.reached = FADE * self.reached + np.minimum(counts, s.depth)
            self.accepted = FADE * self.accepted + counts - 1
        alive = self.left > 0
        ended = self.written[~alive].tolist()
        if ended:
            for name in ("left", "ease", "written", "lag", "reached", "accepted"):
                setattr(self, name, getattr(self, name)[alive])
        return ended

    def catch_up_rows(self) -> int:
        """Rows of the passes that the neural drafter has to make first, as `rollout.runner` counts them."""
        reach = entries_in_reach(len(self), WINDOW, on_gpu=True)
        missing, most = min(reach, int(self.lag.max())), entries_at_once(self.size, STEP, WINDOW)
        return self.size * most * -(-max(0, missing - STEP) // most)


def plain_s(machine: Machine, lengths: list[int]) -> float:
    """Seconds of plain decoding."""
    running = len(lengths) - np.searchsorted(np.sort(lengths), np.arange(max(lengths)), side="right")
    sizes, rounds = np.unique(running, return_counts=True)
    seconds = sum(n * machine.seconds(bucket(LADDER, int(b)), PLAIN) for b, n in zip(sizes, rounds, strict=True))
    return float(seconds) * fmean(NOISE)


def informed_s(machine: Machine, batch: Batch, score: Callable[[Floats], float], rng: np.random.Generator) -> float:
    """Seconds of a policy that takes the strategy with the highest `score` of its tokens per second by sequence."""
    total, rounds, chosen = 0.0, 0, PLAIN
    while len(batch):
        if rounds % DECIDE_EVERY == 0:
            fitting = [s for s in STRATEGIES if s.fits(len(batch))]
            scored = [score(batch.expected(s)) / machine.seconds(batch.size, s) for s in fitting]
            chosen = fitting[int(np.argmax(scored))]
        rounds += 1
        total += machine.seconds(batch.size, chosen)
        batch.write(1 + batch.draw(chosen, rng), chosen)
    return total * fmean(NOISE)


def _discounted(tokens: Floats) -> float:
    """A lead of less than a quarter over plain decoding is not taken."""
    mean = float(tokens.mean())
    return 1.0 if mean == 1.0 else 0.8 * mean


def _slowest(tokens: Floats) -> float:
    """Of the eighth of the sequences with the lowest acceptance."""
    count = len(tokens) // 8 + 1
    return float(np.partition(tokens, count - 1)[:count].mean())


INFORMED: dict[str, Callable[[Floats], float]] = {
    "throughput": lambda tokens: float(tokens.mean()),
    "discounted": _discounted,
    "stragglers": _slowest,
}


def tuned_s(machine: Machine, batch: Batch, tuner: Tuner, case: Case, rng: np.random.Generator) -> float:
    total, last, max_tokens = 0.0, PLAIN, case.flat or MAX_TOKENS
    while len(batch):
        count, size, rows = len(batch), batch.size, batch.catch_up_rows()
        left = float((max_tokens - batch.written).mean())
        ratio = slowest(batch.reached, batch.accepted)
        choice = tuner.choose(BatchContext(count, left, {NEURAL: rows}, ratio))
        s = choice.strategy
        seconds = machine.seconds(size, s) * rng.uniform(*NOISE) * (KEEPING if s.plain else 1.0)
        seconds += SWITCH_S * (s.drafter != last.drafter)
        rows = rows if s.drafter == NEURAL else 0
        passes = rows / (size * entries_at_once(size, STEP, WINDOW))
        seconds += case.catch_up * (passes * PASS_S * rng.uniform(0.9, 1.3) + rows * ROW_S)
        accepted = batch.draw(s, rng)
        told = None if s.plain else accepted.tolist()
        ended = batch.write(1 + accepted, s)
        tuner.observe(RoundOutcome(choice, count, seconds, told, catch_up_rows=rows, ended=ended))
        total += seconds
        last = s
    return total


def steps_of(case: Case, seed: int, steps: int) -> list[tuple[list[int], list[float], float]]:
    """By step: lengths, ease, and how much higher the neural drafter's acceptance is."""
    found = []
    for step in range(steps + 1):
        dice = random.Random(f"{seed} {step}")
        drawn = lengths(dice, case.flat)
        ease = [case.accept - ACCEPT[NEURAL] + dice.gauss(0.0, case.spread) for _ in drawn]
        found.append((drawn, ease, -0.6 if case.bad_steps[0] <= step < case.bad_steps[1] else 0.0))
    return found


@functools.cache
def best_s(machine: Machine, case: Case, seed: int, steps: int) -> float:
    """Seconds of the best in hindsight, without the first step: the fastest informed policy or plain decoding."""
    played = steps_of(case, seed, steps)[1:]
    found = [sum(plain_s(machine, drawn) for drawn, _, _ in played)]
    for score in INFORMED.values():
        rng = np.random.default_rng([seed, 1])
        found.append(sum(informed_s(machine, Batch(*one), score, rng) for one in played))
    return min(found)


def play(
    machine: Machine, case: Case, seed: int, steps: int, explore: float, make: type[Tuner] = Tuner
) -> dict[str, float]:
    tuner = make(STRATEGIES, MAX_BATCH, explore)
    rng = np.random.default_rng([seed, 2])
    plain: list[float] = []
    tuned: list[float] = []
    before = (0.0, 0.0)
    for step, (drawn, ease, neural) in enumerate(steps_of(case, seed, steps)):
        plain.append(plain_s(machine, drawn))
        tuned.append(tuned_s(machine, Batch(drawn, ease, neural), tuner, case, rng))
        if step == 0:
            before = (tuner.explored_s, tuner.total_s)
    return {
        "speedup": sum(plain[1:]) / sum(tuned[1:]),
        "of_best": best_s(machine, case, seed, steps) / sum(tuned[1:]),
        "median": median(p / t for p, t in zip(plain[1:], tuned[1:], strict=True)),
        "explored": (tuner.explored_s - before[0]) / (tuner.total_s - before[1]),
    }


@functools.cache
def machine_of(costs: Path, context: int) -> Machine:
    return Machine.of(json.loads(costs.read_text().splitlines()[-1])["rows"], context)


def play_all(
    costs: Path, names: list[str], seeds: Sequence[int], steps: int, explore: float, make: type[Tuner] = Tuner
) -> Iterator[dict[str, Any]]:
    """A row for every case: means over the seeds."""
    for name in names:
        machine = machine_of(costs, CASES[name].context)
        played = [play(machine, CASES[name], seed, steps, explore, make) for seed in seeds]
        yield {"case": name} | {key: round(fmean(p[key] for p in played), 4) for key in played[0]}


def arguments(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, required=True, help="what roofline.py printed, with its line of JSON")
    parser.add_argument("--cases", default=",".join(CASES), help="some of: " + ", ".join(CASES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--explore", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, default=8, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    return parser


def seeds_of(args: argparse.Namespace) -> range:
    return range(args.first_seed, args.first_seed + args.seeds)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = arguments(__doc__).parse_args(argv)
    print("case          times plain  of the best  median step  explored")
    rows = []
    for row in play_all(args.costs, args.cases.split(","), seeds_of(args), args.steps, args.explore):
        rows.append(row)
        speeds = f"{row['speedup']:>11.3f} {row['of_best']:>12.1%} {row['median']:>12.3f}"
        print(f"{row['case']:<13} {speeds} {row['explored']:>9.1%}", flush=True)
    result = {"steps": args.steps, "explore": args.explore, "seeds": list(seeds_of(args)), "rows": rows}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
