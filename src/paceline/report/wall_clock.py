"""How much faster the run was than with plain decoding, in wall-clock time, from what the run itself measured.

A rollout with plain decoding is played through: every round adds a token to each sequence that is not finished, so that
the lengths of the answers say how many sequences decode in each round, and what a plain round costs at that batch size
is known from the plain rounds that the tuner has run, two in a row, because the first one builds what the next ones
reuse. With several workers the slowest one counts.

Plain rounds are few where speculation pays, and a machine is not equally fast in every step. So their costs are fitted
together with those of all other rounds, seconds(step, strategy, batch size) = speed(step) x cost(strategy, batch
size), and larger batches are taken to cost no less than smaller ones.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from paceline.observe.strategy_totals import StrategyTotals, read_totals
from paceline.observe.timeline import ROLLOUT
from paceline.report.rundata import RunData
from paceline.report.savings import Savings
from paceline.report.savings_text import MIN_PLAIN_ROUNDS

FIT_PASSES = 50  # of the fit; it settles within a few
MANY = 512  # sequences, from which on the batch of a worker is not limited
REST = ("reward", "update_actor", "train_drafter", "merge_drafter")
"""Parts of a step that are the same with plain decoding, as `paceline compare` counts them."""
PLAIN_NAME = "plain"
ABOUT_ONE = 0.95  # from which on nobody would say slower


K = TypeVar("K")


@dataclass(frozen=True)
class WallClock:
    rollout: float
    """How many times faster the rollout was than a plain one: the median of the steps, as of `paceline compare`."""
    step: float
    """Of whole steps, without evaluations and checkpoints."""
    plain_rounds: int
    """That the estimate rests on."""


def measure_wall_clock(run: RunData) -> WallClock | None:
    """None where no round was speculative, or none was plain to compare with."""
    totals = [t for t in read_totals(run.spans) if t.seconds > 0]
    plain = [t for t in totals if t.strategy == PLAIN_NAME]
    if not plain or len(plain) == len(totals):
        return None
    speed, costs = _fit(totals)
    decoding = _decoding_s(run)
    limit = int(run.settings.get("rollout.max_batch") or MANY)
    answers = {row["step"]: row for row in run.answers}
    rollouts, steps = [], []
    for metrics in run.metrics:
        number = metrics["step"]
        gen = float(metrics.get("timing_s/gen", math.nan))
        if number not in answers or number not in decoding or not gen > 0:
            continue
        row = answers[number]
        workers = row.get("workers") or [0] * len(row["lengths"])
        lengths: dict[int, list[int]] = defaultdict(list)
        for worker, length in zip(workers, row["lengths"], strict=False):
            lengths[worker].append(length)
        slowest = max(plain_rollout_s(some, costs, limit) for some in lengths.values()) * speed.get(number, 1.0)
        without = max(0.0, gen - max(decoding[number].values())) + slowest
        rest = sum(v for part in REST if math.isfinite(v := float(metrics.get(f"timing_s/{part}", 0.0))))
        rollouts.append(without / gen)
        steps.append((without + rest) / (gen + rest))
    if not rollouts:
        return None
    return WallClock(median(rollouts), median(steps), sum(t.rounds for t in plain))


def describe_wall_clock(run: RunData, s: Savings) -> str:
    """The headline: how much faster than plain, and what became of idle time; empty where neither can be told."""
    found = measure_wall_clock(run)
    parts = []
    if found:
        few = f" (judging by only {found.plain_rounds} plain rounds)" if found.plain_rounds < MIN_PLAIN_ROUNDS else ""
        both = found.rollout >= ABOUT_ONE and found.step >= ABOUT_ONE
        rollout = f"{found.rollout:.1f}x" if both else _times(found.rollout)
        parts.append(f"rollout about {rollout}, step {_times(found.step)} than plain{few}")
    if s.idle_s and s.training_s:
        parts.append(f"idle time of workers used: {s.training_idle_s / s.idle_s:.0%}")
    return "; ".join(parts)


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x faster" if ratio >= ABOUT_ONE else f"{1 / max(ratio, 1e-9):.1f}x slower"


def _decoding_s(run: RunData) -> dict[int, dict[int, float]]:
    """Seconds of all rounds by step and worker."""
    out: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in run.spans:
        if span.name == ROLLOUT:
            for by_bucket in span.args.get("strategies", {}).values():
                out[span.step][span.worker] += sum(seconds for _, seconds, *_ in by_bucket.values())
    return out


def _fit(totals: Sequence[StrategyTotals]) -> tuple[dict[int, float], dict[int, float]]:
    """The factor of each step, and seconds of a plain round by batch size at a factor of 1. A count weighs by its root:
    the rounds of a rollout are slow or fast together."""
    seen = []
    for t in totals:
        seconds = t.mean_s if t.strategy == PLAIN_NAME else t.seconds / t.rounds
        seen.append((t.step, (t.strategy, t.bucket), math.log(seconds), math.sqrt(t.rounds)))
    speed = dict.fromkeys((step for step, *_ in seen), 0.0)
    costs: dict[tuple[str, int], float] = {}
    for _ in range(FIT_PASSES):
        costs = _means((kind, value - speed[step], weight) for step, kind, value, weight in seen)
        speed = _means((step, value - costs[kind], weight) for step, kind, value, weight in seen)
    rounds: dict[int, float] = defaultdict(float)
    for t in totals:
        if t.strategy == PLAIN_NAME:
            rounds[t.bucket] += t.rounds
    plain = {bucket: math.exp(value) for (name, bucket), value in costs.items() if name == PLAIN_NAME}
    return {step: math.exp(value) for step, value in speed.items()}, _rising(plain, rounds)


def _means(values: Iterable[tuple[K, float, float]]) -> dict[K, float]:
    """Weighted, by kind."""
    total: dict[K, float] = defaultdict(float)
    weights: dict[K, float] = defaultdict(float)
    for kind, value, weight in values:
        total[kind] += value * weight
        weights[kind] += weight
    return {kind: total[kind] / weights[kind] for kind in total}


def _rising(costs: dict[int, float], weights: dict[int, float]) -> dict[int, float]:
    """The nearest costs that do not fall with the batch size: neighbours that do are averaged."""
    blocks: list[tuple[float, float, list[int]]] = []
    for size in sorted(costs):
        blocks.append((costs[size] * weights[size], weights[size], [size]))
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, weight, sizes = blocks.pop()
            before = blocks.pop()
            blocks.append((before[0] + total, before[1] + weight, before[2] + sizes))
    return {size: total / weight for total, weight, sizes in blocks for size in sizes}


def plain_rollout_s(lengths: Sequence[int], costs: dict[int, float], limit: int) -> float:
    """Seconds in which plain decoding writes answers of these lengths, at most `limit` at a time, the first ones first.
    The first token of each comes with its prompt."""
    waiting = list(reversed(lengths))
    running: list[int] = []  # rounds at whose end each is finished
    now = 0
    seconds = 0.0
    while waiting or running:
        while waiting and len(running) < limit:
            heapq.heappush(running, now + max(0, waiting.pop() - 1))
        end = running[0]
        seconds += (end - now) * _cost(costs, len(running))
        now = end
        while running and running[0] <= now:
            heapq.heappop(running)
    return seconds


def _cost(costs: dict[int, float], size: int) -> float:
    """Between two batch sizes that were measured on a straight line, beyond them as at the nearest."""
    below = max((s for s in costs if s <= size), default=min(costs))
    above = min((s for s in costs if s >= size), default=max(costs))
    if below >= above:
        return costs[below] if below <= size else costs[above]
    share = (size - below) / (above - below)
    return costs[below] + share * (costs[above] - costs[below])
