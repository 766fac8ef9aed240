"""Was it worth it? Seconds lost to the tail, saved by speculation, and spent on training the drafter.

All numbers are measured in the run itself. A plain round at a batch size has a median duration; a speculative round
with an accept length of 3 replaces 3 plain rounds, so it saves 3 x (their median) - (its own duration).
Speculative rounds without plain rounds near their batch size have no comparison and are left out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from paceline.observe.strategy_totals import StrategyTotals, bucket_above, bucket_below, read_totals
from paceline.observe.timeline import IDLE, LOST, MERGE, REWARD, ROLLOUT, TRAIN, Span
from paceline.report.rundata import RunData

Interval = tuple[float, float]
"""Start and end in seconds since the run began."""


@dataclass(frozen=True)
class Savings:
    """Seconds, summed over workers where it does not say otherwise."""

    steps: int
    workers: int
    total_s: float
    """All steps, wall-clock time."""
    rollout_s: float
    """Rollout, wall-clock time."""
    idle_s: float
    """Workers had nothing to decode while others decoded."""
    tail_s: float
    """Workers decoded fewer than a quarter of the largest batch that they had in that rollout."""
    speculative_s: float
    """Speculative rounds."""
    compared_s: float
    """Those of them that have plain rounds to compare with."""
    plain_s: float
    """Plain rounds for the same tokens: plain-equivalent rounds x median seconds of a plain round."""
    plain_rounds: int
    """Plain rounds in the run."""
    training_s: float
    """Training the drafter."""
    training_idle_s: float
    """The part of it in which the worker would have been idle."""
    invested_s: float
    """Training the drafter beyond idle time because it was expected to pay back, wall-clock time."""
    cost_s: float
    """All workers, while the drafter was trained or merged and nobody decoded."""

    @property
    def lost_s(self) -> float:
        return self.idle_s + self.tail_s

    @property
    def saved_s(self) -> float:
        return self.plain_s - self.compared_s

    @property
    def net_s(self) -> float:
        return self.saved_s - self.cost_s


def measure_savings(run: RunData) -> Savings:
    totals = read_totals(run.spans)
    plain = [t for t in totals if t.strategy == "plain"]
    speculative = [t for t in totals if t.strategy != "plain"]
    medians = _plain_medians(plain)
    compared = [(t, seconds) for t in speculative if (seconds := _nearest(medians, t.bucket)) is not None]
    idle, training, training_idle = _idle_and_training(run.spans)
    return Savings(
        steps=len(run.metrics),
        workers=max(1, len(run.workers)),
        total_s=run.total("timing_s/step"),
        rollout_s=run.total("timing_s/gen"),
        idle_s=idle,
        tail_s=sum(span.args.get("tail_s", 0.0) for span in run.spans if span.name == ROLLOUT),
        speculative_s=sum(t.seconds for t in speculative),
        compared_s=sum(t.seconds for t, _ in compared),
        plain_s=sum(t.plain_equivalent * seconds for t, seconds in compared),
        plain_rounds=sum(t.rounds for t in plain),
        training_s=training,
        training_idle_s=training_idle,
        invested_s=run.total("drafter/invested_s"),
        cost_s=_training_cost(run.spans),
    )


def _plain_medians(plain: list[StrategyTotals]) -> dict[int, float]:
    """Seconds of a plain round by bucket: the median of the rollouts' medians, weighted by their rounds."""
    by_bucket: dict[int, list[StrategyTotals]] = defaultdict(list)
    for t in plain:
        by_bucket[t.bucket].append(t)
    out = {}
    for bucket, totals in by_bucket.items():
        half = sum(t.rounds for t in totals) / 2
        seen = 0
        for t in sorted(totals, key=lambda t: t.median_s):
            seen += t.rounds
            if seen >= half:
                out[bucket] = t.median_s
                break
    return out


def _nearest(medians: dict[int, float], bucket: int) -> float | None:
    """At this bucket or a neighbour: the smaller one first, whose rounds are shorter, so that savings are not
    overstated."""
    return next((medians[n] for n in (bucket, bucket_below(bucket), bucket_above(bucket)) if n in medians), None)


def _idle_and_training(spans: list[Span]) -> tuple[float, float, float]:
    """Seconds in which workers were idle, in which they trained the drafter, and in which both is true: a worker that
    trains while another one still decodes would have been idle."""
    idle = training = both = 0.0
    ends: dict[int, dict[int, float]] = defaultdict(dict)  # of rollouts, by step and worker
    lanes: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.name == ROLLOUT:
            ends[span.step][span.worker] = max(span.end, ends[span.step].get(span.worker, 0.0))
        elif span.name in (IDLE, TRAIN):
            lanes[span.step, span.worker].append(span)
    for (step, worker), lane in lanes.items():
        last = max((end for other, end in ends[step].items() if other != worker), default=0.0)
        trained = [(s.start, s.end) for s in lane if s.name == TRAIN]
        free = [(s.start, s.end) for s in lane if s.name == IDLE]
        free = _union(free + [(start, min(end, last)) for start, end in trained if start < last])
        idle += sum(end - start for start, end in free)
        training += sum(end - start for start, end in trained)
        both += sum(max(0.0, min(e, end) - max(s, start)) for start, end in trained for s, e in free)
    return idle, training, both


def _training_cost(spans: list[Span]) -> float:
    """Seconds of all workers in which drafter training or merging kept the step waiting: training steps that outlast
    the last answer, training after the update, merging."""
    cost = 0.0
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_step[span.step].append(span)
    for step_spans in by_step.values():
        rollout_end = max((s.end for s in step_spans if s.name in (ROLLOUT, REWARD)), default=0.0)
        late = [s for s in step_spans if s.name in (TRAIN, MERGE) and s.end > rollout_end]
        workers = len({s.worker for s in step_spans if s.name != LOST})
        waited = _union([(max(rollout_end, s.start), s.end) for s in late])
        cost += workers * sum(end - start for start, end in waited)
    return cost


def _union(intervals: list[Interval]) -> list[Interval]:
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out
