"""Costs and work of a run, from its directory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.observe.strategy_totals import StrategyTotals, read_totals
from paceline.observe.timeline import ROLLOUT, Span
from paceline.report.rundata import RunData
from paceline.simulate.costs import BatchCurve, StepCosts, StepWork

MIN_PLAIN = 3  # plain rounds of a batch size that say what one costs
TOKENS_PER_FLIP = "ahead/tokens_per_flip"
DRY = ("idle_s", "training_s", "ahead_s")  # worker seconds with nothing to decode, by what is done in them
AFTER = ("reward", "end_rollout", "train_drafter", "merge_drafter", "save_checkpoint")  # parts of a step


@dataclass(frozen=True)
class MeasuredRun:
    costs: StepCosts
    steps: list[StepWork]
    workers: int
    slots: int
    max_tokens: int
    step_s: float
    rollout_s: float
    dry: float
    """Share of the workers' time in which they had nothing to decode while others did."""
    tokens_per_flip: float | None
    """Between neighbouring policies; None if the run did not write ahead."""


def measure_run(run: RunData) -> MeasuredRun:
    """From the steps after the first, which captures graphs and compiles kernels."""
    steps = sorted({row["step"] for row in run.metrics} & {row["step"] for row in run.answers})[1:]
    if not steps:
        count = len(run.metrics)
        raise UserError(f"{run.folder} has {count} steps; a simulation leaves out the first one, so it needs two")
    workers = max(1, int(run.settings.get("cluster.workers") or 1))
    metrics = {row["step"]: row for row in run.metrics}
    rows = [metrics[step] for step in steps]
    spans = [span for span in run.spans if span.step in set(steps)]
    totals = read_totals(spans)
    if not totals:
        raise UserError(f"{run.folder / 'timeline.json'} has no rounds of steps {steps[0]} to {steps[-1]}")
    gradient_s, update_s = _update_costs(rows, workers)
    costs = StepCosts(
        plain=_plain_curve(totals),
        adaptive=_adaptive_curve(totals, _overhead(spans, rows, totals)),
        prefill_s=_prefill_s(rows, spans, run),
        gradient_token_s=gradient_s,
        update_s=update_s,
        rollout_s=_around_rollouts(rows, spans),
        after_s=fmean(sum(row.get(f"timing_s/{part}", 0.0) for part in AFTER) for row in rows),
    )
    step_s = fmean(row["timing_s/step"] for row in rows)
    dry_s = sum(row.get(f"cluster/{kind}", 0.0) for row in rows for kind in DRY)
    flips = [row[TOKENS_PER_FLIP] for row in rows if TOKENS_PER_FLIP in row]
    return MeasuredRun(
        costs,
        [_work(run, step, metrics[step]) for step in steps],
        workers,
        int(run.settings.get("rollout.max_batch") or 256),
        int(run.settings["rollout.max_tokens"]),
        step_s,
        fmean(row["timing_s/gen"] for row in rows),
        dry_s / (workers * step_s * len(rows)),
        median(flips) if flips else None,
    )


def _work(run: RunData, step: int, metrics: Mapping[str, Any]) -> StepWork:
    lengths = tuple(n for row in run.answers if row["step"] == step for n in row["lengths"])
    prompt = float(metrics.get("prompt_length/mean", 0.0))
    tokens = float(metrics.get("actor/tokens", sum(lengths) + prompt * len(lengths)))
    return StepWork(lengths, int(run.settings.get("rollout.samples") or 1), tokens, prompt)


def _sums(totals: list[StrategyTotals]) -> dict[int, tuple[float, float, float]]:
    """Seconds, plain-equivalent rounds and tokens by bucket."""
    found: dict[int, tuple[float, float, float]] = defaultdict(lambda: (0.0, 0.0, 0.0))
    for t in totals:
        seconds, equivalent, tokens = found[t.bucket]
        found[t.bucket] = (seconds + t.seconds, equivalent + t.plain_equivalent, tokens + t.tokens)
    return found


def _adaptive_curve(totals: list[StrategyTotals], overhead: float) -> BatchCurve:
    """Seconds over plain-equivalent rounds, at the mean batch size of each bucket."""
    points = [
        (tokens / equivalent, overhead * seconds / equivalent)
        for seconds, equivalent, tokens in _sums(totals).values()
        if equivalent > 0 and seconds > 0
    ]
    return BatchCurve.of(points)


def _plain_curve(totals: list[StrategyTotals]) -> BatchCurve:
    """Medians of plain rounds by batch size, where there were a few; all there are, where there were never so many."""
    by_bucket: dict[int, list[StrategyTotals]] = defaultdict(list)
    for t in totals:
        if t.strategy == "plain" and t.tokens:
            by_bucket[t.bucket].append(t)
    if not by_bucket:
        raise UserError("the run has no plain rounds to compare with; with speculation.explore above 0 it has some")
    counts = {bucket: sum(t.rounds for t in some) for bucket, some in by_bucket.items()}
    enough = [b for b, count in counts.items() if count >= MIN_PLAIN] or list(by_bucket)
    points = []
    for bucket in enough:
        some = by_bucket[bucket]
        batch = sum(t.tokens for t in some) / sum(t.plain_equivalent for t in some)
        points.append((batch, median(t.median_s for t in some for _ in range(t.rounds))))
    return BatchCurve.of(points)


def _rollouts(spans: list[Span]) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.name == ROLLOUT:
            found[span.step].append(span)
    return found


def _overhead(spans: list[Span], rows: list[dict[str, Any]], totals: list[StrategyTotals]) -> float:
    """Times the seconds of its rounds that decoding took: messages and bookkeeping come between them."""
    rounds_s = sum(t.seconds for t in totals)
    inside_s = sum(span.seconds for some in _rollouts(spans).values() for span in some)
    prefill = fmean(row.get("rollout/share/prefill", 0.0) for row in rows)
    return max(1.0, (inside_s - prefill * rounds_s / max(1e-9, 1 - prefill)) / rounds_s)


def _prefill_s(rows: list[dict[str, Any]], spans: list[Span], run: RunData) -> float:
    """Seconds of prefilling over the requests."""
    steps = {row["step"] for row in rows}
    requests = sum(len(row["lengths"]) for row in run.answers if row["step"] in steps)
    shares = {row["step"]: row.get("rollout/share/prefill", 0.0) for row in rows}
    seconds = sum(shares.get(step, 0.0) * span.seconds for step, some in _rollouts(spans).items() for span in some)
    return seconds / max(1, requests)


def _around_rollouts(rows: list[dict[str, Any]], spans: list[Span]) -> float:
    """Seconds of a rollout before the first round and after the last one."""
    rollouts = _rollouts(spans)
    outside = [
        row["timing_s/gen"] - (max(s.end for s in some) - min(s.start for s in some))
        for row in rows
        if (some := rollouts.get(row["step"]))
    ]
    return max(0.0, median(outside)) if outside else 0.0


def _update_costs(rows: list[dict[str, Any]], workers: int) -> tuple[float, float]:
    """Worker seconds per token, and seconds of an update without any: a line through the steps' updates. Where steps
    are too alike to tell, all of it is by the token."""
    seconds = np.array([row["timing_s/update_actor"] for row in rows])
    tokens = np.array([row.get("actor/tokens", 0.0) for row in rows]) / workers
    if not tokens.any():
        return 0.0, float(seconds.mean())
    if len(rows) > 2 and tokens.std() > 0.1 * tokens.mean():
        slope, constant = np.polyfit(tokens, seconds, 1)
        if slope > 0 and constant > 0:
            return float(slope), float(constant)
    return float(seconds.sum() / tokens.sum()), 0.0
