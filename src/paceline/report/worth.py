"""Was it worth it? Time lost to the tail, time won back by guessing ahead, and what training the drafter cost.

Everything is taken from what this run measured. A plain round at a batch size has a median duration; a round with
guesses that wrote three tokens per text did the work of three such rounds, and what it took less than they do is won.
Where no plain round was measured near a batch size there is no comparison, and nothing is claimed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from paceline.observe.rounds import Tally, above, below, tallies
from paceline.observe.timeline import IDLE, LOST, MERGE, REWARD, ROLLOUT, TRAIN, Span
from paceline.report.rundata import RunData

Interval = tuple[float, float]
FEW = 30  # plain rounds: with fewer, a slow or a fast one can sway the answer


@dataclass(frozen=True)
class Worth:
    """Seconds, summed over workers."""

    steps: int
    workers: int
    whole_s: float
    """All steps, by the clock."""
    rollout_s: float
    """Rollout, by the clock."""
    waiting_s: float
    """Workers had nothing to decode while others had."""
    tail_s: float
    """Workers decoded fewer than a quarter of the most texts they had in that rollout."""
    guessing_s: float
    """Rounds with guesses."""
    compared_s: float
    """Those of them for which there are plain rounds to compare with."""
    plain_s: float
    """What plain rounds would have taken for the same."""
    plain_rounds: int
    """Plain rounds in the run."""
    training_s: float
    """Training the drafter."""
    training_waiting_s: float
    """The part of it in which the worker would have waited anyway."""
    cost_s: float
    """All workers, while the drafter was trained or made and nobody decoded."""

    @property
    def lost_s(self) -> float:
        return self.waiting_s + self.tail_s

    @property
    def won_s(self) -> float:
        return self.plain_s - self.compared_s

    @property
    def net_s(self) -> float:
        return self.won_s - self.cost_s


def measure(run: RunData) -> Worth:
    rounds = tallies(run.spans)
    guesses = [t for t in rounds if t.strategy != "plain"]
    plain = _plain_seconds(rounds)
    compared = [(t, seconds) for t in guesses if (seconds := _near(plain, t.size)) is not None]
    waiting, training, training_waiting = _waiting(run.spans)
    return Worth(
        steps=len(run.metrics),
        workers=max(1, len(run.workers)),
        whole_s=run.total("timing_s/step"),
        rollout_s=run.total("timing_s/gen"),
        waiting_s=waiting,
        tail_s=sum(span.args.get("tail_s", 0.0) for span in run.spans if span.name == ROLLOUT),
        guessing_s=sum(t.seconds for t in guesses),
        compared_s=sum(t.seconds for t, _ in compared),
        plain_s=sum(t.worth * seconds for t, seconds in compared),
        plain_rounds=sum(t.rounds for t in rounds if t.strategy == "plain"),
        training_s=training,
        training_waiting_s=training_waiting,
        cost_s=_cost(run.spans),
    )


def _plain_seconds(rounds: list[Tally]) -> dict[int, float]:
    """By batch size, the median duration of a plain round: of the medians of all rollouts, each as often as it had
    rounds."""
    by_size: dict[int, list[Tally]] = defaultdict(list)
    for t in rounds:
        if t.strategy == "plain":
            by_size[t.size].append(t)
    out = {}
    for size, group in by_size.items():
        half, seen = sum(t.rounds for t in group) / 2, 0
        for t in sorted(group, key=lambda t: t.median):
            seen += t.rounds
            if seen >= half:
                out[size] = t.median
                break
    return out


def _near(plain: dict[int, float], size: int) -> float | None:
    """At this size or a neighbour; the smaller one first, whose rounds are shorter, so as not to boast."""
    return next((plain[n] for n in (size, below(size), above(size)) if n in plain), None)


def _waiting(spans: list[Span]) -> tuple[float, float, float]:
    """Seconds in which workers waited for others, in which the drafter was trained, and in which both is true: a worker
    that trains while another one still decodes would have waited."""
    waiting = training = both = 0.0
    ends: dict[int, dict[int, float]] = defaultdict(dict)
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
        waiting += sum(end - start for start, end in free)
        training += sum(end - start for start, end in trained)
        both += sum(max(0.0, min(e, end) - max(s, start)) for start, end in trained for s, e in free)
    return waiting, training, both


def _cost(spans: list[Span]) -> float:
    """Seconds that training took from everybody: from the last answer on all wait until who trains has ended its step;
    then come training beside the update and the making of new versions."""
    cost = 0.0
    steps: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        steps[span.step].append(span)
    for mine in steps.values():
        over = max((s.end for s in mine if s.name in (ROLLOUT, REWARD)), default=0.0)
        busy = [(max(over, s.start), s.end) for s in mine if s.name in (TRAIN, MERGE) and s.end > over]
        workers = len({s.worker for s in mine if s.name != LOST})
        cost += workers * sum(end - start for start, end in _union(busy))
    return cost


def _union(intervals: list[Interval]) -> list[Interval]:
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def verdict(w: Worth) -> str:
    """The answer in a few words."""
    if not w.guessing_s:
        return "Nothing was guessed ahead in this run, so there was nothing to win."
    if not w.compared_s:
        return "This run alone cannot tell: it has no plain rounds to compare with."
    whole = w.rollout_s * w.workers + w.net_s
    share = w.net_s / whole if whole > 0 else 0.0
    few = w.plain_rounds < FEW
    basis = f", judging by only {_count(w.plain_rounds, 'plain round')}" if few else ""
    if w.net_s > 0:
        return f"Yes{basis}: about {duration(w.net_s)} won, {share:.0%} of what rollout would have taken without."
    return f"No{basis}: about {duration(-w.net_s)} more than without."


def sentences(w: Worth) -> list[str]:
    """The answer in full."""
    each = " of worker time" if w.workers > 1 else ""
    few = "with fewer than a quarter of the largest batch decoding"
    lost = f"{duration(w.lost_s)} {few}"
    if w.workers > 1 or w.waiting_s:
        parts = f"{duration(w.waiting_s)} waiting with nothing to decode, {duration(w.tail_s)} {few}"
        lost = f"{duration(w.lost_s)}{each}, {parts}"
    out = [
        f"{_count(w.steps, 'step')} took {duration(w.whole_s)}, "
        f"of which rollout was {duration(w.rollout_s)} ({_share(w.rollout_s, w.whole_s)}).",
        f"Lost to the tail: {lost}.",
    ]
    if w.compared_s:
        more = f"{duration(w.won_s)}" if w.won_s >= 0 else f"nothing, it cost {duration(-w.won_s)}"
        out.append(
            f"Won back by guessing ahead: about {more}. Rounds with guesses took {duration(w.compared_s)} for what "
            f"plain rounds, as long as the {w.plain_rounds:,} measured in this run, would have taken "
            f"{duration(w.plain_s)}."
        )
    elif not w.guessing_s:
        out.append("Won back by guessing ahead: nothing, because no round had guesses.")
    missing = w.guessing_s - w.compared_s
    if w.guessing_s and missing > 0.005 * w.guessing_s:
        out.append(
            f"Another {duration(missing)} of rounds with guesses ran at batch sizes near which no plain round was "
            "measured; they have no comparison and are left out."
        )
    if w.training_s:
        used = f", {_share(w.training_waiting_s, w.waiting_s)} of all waiting" if w.training_waiting_s else ""
        out.append(
            f"Training the drafter took {duration(w.training_s)}{each}, of which {duration(w.training_waiting_s)} "
            f"would have been spent waiting anyway{used}. It cost {duration(w.cost_s)}{each}: training while nobody "
            "decoded, and making new versions."
        )
    else:
        out.append("The drafter was not trained in this run, so that cost nothing.")
    out.append("For an exact answer roll out both ways, on the same prompts and weights: `paceline compare`.")
    return out


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    if whole >= 120:
        return f"{whole // 60} min {whole % 60} s"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
