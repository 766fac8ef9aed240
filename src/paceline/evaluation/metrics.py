"""Scores under verl's names, `val-core/DATA/reward/mean@N`, and beside them pass@k, for metrics.jsonl and trackers.

As in verl, `val-core` has the mean over all N samples and the best of them, `val-aux` what belongs to fewer or to a
single reward function. verl draws the subsets of `best@k` with replacement, a thousand times; here it is the exact
mean over all subsets without replacement, which is unbiased.
"""

from __future__ import annotations

from statistics import fmean, pstdev

from paceline.evaluation.scores import GREEDY, MEAN, EvalScores
from paceline.observe.metrics import short_names


def eval_metrics(scores: EvalScores) -> dict[str, float]:
    """Of every data set."""
    out: dict[str, float] = {}
    for data in scores.data:
        out |= _of_data(data, scores.of(data))
    return out


def _of_data(data: str, scores: EvalScores) -> dict[str, float]:
    n = scores.samples
    core, aux = f"val-core/{data}", f"val-aux/{data}"
    out = {f"{core}/reward/mean@{n}": scores.value(MEAN)}
    if n > 1:
        out[f"{aux}/reward/std@{n}"] = fmean(pstdev(p.rewards) for p in scores.prompts)
    for k in scores.ks:
        out[f"{core}/pass@{k}"] = scores.value(f"pass@{k}")
        if k > 1:
            out[f"{core if k == n else aux}/reward/best@{k}/mean"] = scores.value(f"best@{k}")
    if scores.prompts[0].greedy is not None:
        out[f"{core}/greedy/mean@1"] = scores.value(GREEDY)
    for name, label in zip(scores.functions, short_names(scores.functions), strict=True):
        out[f"{aux}/{label}/mean@{n}"] = scores.value(name)
    out[f"{aux}/response_length/mean"] = scores.mean_length
    out[f"{aux}/response_length/clip_ratio"] = scores.clip_ratio
    return out
