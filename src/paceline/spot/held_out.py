"""Evaluating a candidate against the published drafter, on answers that neither was trained on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.draft.eagle.loss import expected_accept_length
from paceline.draft.eagle.model import copy_of
from paceline.spot.evaluation import Evaluation
from paceline.spot.samples import FeatureSample, excerpt, lay_out

if TYPE_CHECKING:
    from paceline.draft.eagle.model import EagleModel

MIN_EVAL_ANSWERS = 4  # that share the tokens drafters are evaluated on, or a single long answer would decide


def choose_excerpts(samples: Iterable[FeatureSample], max_tokens: int) -> list[FeatureSample]:
    """Of each sample at most a part, of all together at most `max_tokens`."""
    chosen: list[FeatureSample] = []
    left = max_tokens
    for sample in samples:
        part = excerpt(sample, max_tokens // MIN_EVAL_ANSWERS)
        if len(part) <= left:
            chosen.append(part)
            left -= len(part)
    return chosen


def evaluate(drafter: EagleModel, candidate: list[Tensor], samples: list[FeatureSample], runs: int) -> Evaluation:
    """The published drafter against one with these weights, for chains of `runs` draft tokens."""
    if not samples:
        return Evaluation(0.0, 0.0, 0)
    device = drafter.fc.device
    sequences = lay_out(samples, pin=device.type == "cuda").to(device)
    before = expected_accept_length(drafter, sequences, runs)
    after = expected_accept_length(copy_of(drafter, candidate), sequences, runs)
    return Evaluation(before, after, int(sequences.learn.sum()))
