"""Training that is looked after between rounds is the training that would be made in one go."""

from __future__ import annotations

import json
import random
import time

import pytest
import torch

from paceline.config import load_config
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.eagle.trainer import TrainSettings
from paceline.loop import train
from paceline.spot.buffer import SpotBuffer
from paceline.spot.overlap import OverlappedTraining
from paceline.spot.samples import lay_out
from paceline.spot.trainer import SpotTrainer

from ..draft.test_training import counting_policy
from .test_trainer import counted

SETTINGS = TrainSettings(lr=5e-3, runs=3, warmup=1)


def make(answers: int = 60, device: str = "cpu") -> SpotTrainer:
    drafter = EagleModel(counting_policy().to(device), DrafterShape(64, 32)).init_weights(0, std=0.1)
    buffer = SpotBuffer(2**24)
    for sample in counted(drafter, answers):
        buffer.put(sample)
    return SpotTrainer(drafter, buffer, SETTINGS)


def poll_until(overlap: OverlappedTraining, steps: int) -> None:
    while overlap.stats.steps < steps:
        overlap.poll()
        time.sleep(random.random() / 1000)  # a round of decoding


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_is_the_training_that_would_be_made_in_one_go(device):
    alone, other = make(device=device), make(device=device)
    overlap = OverlappedTraining(other)
    overlap.start()
    poll_until(overlap, 12)
    stats = overlap.stop()
    steps = alone.packs()
    for _ in range(stats.steps):  # of the same size all along: what a step takes beside decoding says little
        alone.begin(lay_out(next(steps)))
        alone.end()
    assert stats.steps >= 12 and stats.tokens == alone.tokens and stats.seconds > 0
    for mine, its in zip(alone.weights, other.weights, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0 if device == "cpu" else 1e-4)


def test_it_stops_within_a_step_and_starts_again():
    overlap = OverlappedTraining(make())
    overlap.start()
    poll_until(overlap, 3)
    before = overlap.stats.steps
    last = overlap.stop().steps
    assert before <= last <= before + 1
    assert overlap.stop().steps == last, "nothing was begun since"
    overlap.start()
    assert overlap.stats.steps == 0
    poll_until(overlap, 2)
    assert overlap.stop().loss > 0


@pytest.mark.parametrize(("due", "waiting", "trains"), [(True, 0, True), (False, 0, False), (True, 1, False)])
def test_it_trains_during_the_last_requests_only(due, waiting, trains):
    overlap = OverlappedTraining(make())
    overlap.start(due)
    for left in (16, 16, 9, 5):
        overlap.after_round(left, waiting)
    assert overlap._packs is None, "too many are running"
    for _ in range(200):
        overlap.after_round(4, waiting)
        time.sleep(0.001)
    assert (overlap.stop().steps > 0) == trains


def test_nothing_to_learn_from():
    overlap = OverlappedTraining(make(0))
    overlap.start()
    for _ in range(5):
        overlap.poll()
    assert overlap.stop().steps == 0


@pytest.mark.gpu
def test_one_worker_trains_in_the_tail_and_writes_what_it_would_have_written(tmp_path):
    """In float32 and with a policy that stands still, so that a different draft changes no token."""
    words = ["steps=3", "cluster.workers=1", "rollout.prompts=4", "rollout.samples=4", "rollout.max_tokens=400"]
    words += [
        "model.dtype=float32",
        "model.device=cuda",
        "learn.lr=1e-30",
        "speculation.drafter=auto",
        "spot.max_interval=1",
    ]
    seen = {}
    for when in ("tail", "off"):
        folder = tmp_path / when
        train(load_config(None, [*words, f"spot.when='{when}'", f"run_dir={folder}"]))
        seen[when] = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert when == "off" or sum(row["drafter/steps"] for row in metrics) > 0
    for mine, its in zip(seen["tail"], seen["off"], strict=True):
        assert mine["lengths"] == its["lengths"] and mine["rewards"] == its["rewards"]
