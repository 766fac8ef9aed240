"""Evaluations as lines of text, short enough for a terminal of 80 columns."""

from __future__ import annotations

import math

from paceline.evaluation.paired import PairedDifference, standard_error
from paceline.evaluation.records import EvalRecord
from paceline.evaluation.scores import GREEDY, MEAN, EvalScores

INDENT = " " * 10


def describe_record(record: EvalRecord, best: bool) -> str:
    return f"eval {record.step:<4} {describe_scores(record.scores)}  {record.seconds:.1f} s" + (
        "  best" if best else ""
    )


def describe_scores(scores: EvalScores) -> str:
    """Mean reward ± its standard error, pass@1 where it is another number, and pass@k for the largest k."""
    se = standard_error(scores.per_prompt(MEAN))
    mean = scores.value(MEAN)
    words = [f"reward {mean:.3f} ± {se:.3f}" if math.isfinite(se) else f"reward {mean:.3f}"]
    passes = {k: scores.value(f"pass@{k}") for k in sorted({scores.ks[0], scores.ks[-1]})}
    words += [f"pass@{k} {value:.3f}" for k, value in passes.items() if k > 1 or abs(value - mean) > 1e-9]
    if scores.prompts[0].greedy is not None:
        words.append(f"greedy {scores.value(GREEDY):.3f}")
    return "  ".join(words)


def describe_difference(d: PairedDifference, since: str) -> str:
    """± is a standard error; the interval has 95 %."""
    if d.prompts < 2:
        return f"{INDENT}{d.difference:+.3f} {since}; one prompt has no standard error"
    if not d.changed:
        return f"{INDENT}{d.difference:+.3f} {since}: the same on all {d.prompts} prompts"
    interval = f"{d.low:+.3f} to {d.high:+.3f}"
    return f"{INDENT}{d.difference:+.3f} ± {d.se:.3f} {since}, {interval}; unpaired ± {d.se_unpaired:.3f}"
