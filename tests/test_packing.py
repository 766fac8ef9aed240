"""benchmarks/packing.py compares two layouts with the same loss."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from paceline.draft.eagle.loss import read_sequences, unrolled_loss
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.spot.samples import FeatureSample, lay_out

from .conftest import load_file, tiny_model

FILE = Path(__file__).parents[1] / "benchmarks" / "packing.py"


def test_padding_changes_nothing_but_the_cost():
    packing = load_file(FILE)
    drafter = EagleModel(tiny_model(dtype=torch.float64), DrafterShape(64, 16)).init_weights(1, std=0.2)
    dice, samples = random.Random(3), []
    for length in (9, 40, 23):
        sequence = read_sequences(drafter, [([dice.randrange(128) for _ in range(length)], 4)])
        samples.append(FeatureSample(sequence.tokens.int(), 4, sequence.features, sequence.hidden))
    packed, padded = lay_out(samples), packing.padded_sequences(samples)
    assert len(packed.tokens) == 72 and len(padded.tokens) == 120 and padded.learn.sum() == packed.learn.sum()
    losses = [unrolled_loss(drafter, sequences, 3, "soft")[0] for sequences in (packed, padded)]
    torch.testing.assert_close(*losses)
