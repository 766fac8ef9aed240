"""A step's gradients with padding, which is what a graph replays, are those of the sequences alone."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.draft.eagle.gradients import CLIP, SMALLEST, GraphedGradients, gradients, make_inputs, put, size_of
from paceline.draft.eagle.loss import PackedSequences, read_sequences
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.eagle.trainer import EagleTrainer, TrainSettings

from ..conftest import tiny_model


def make(device: str = "cpu", dtype: torch.dtype = torch.float64, vocab: torch.Tensor | None = None) -> EagleModel:
    model = tiny_model(dtype=dtype).to(device)
    drafter = EagleModel(model, DrafterShape(64, 40), None if vocab is None else vocab.to(device))
    return drafter.init_weights(1, std=0.2).requires_grad_(True)


def some_sequences(drafter: EagleModel, lengths: list[int], seed: int = 0) -> PackedSequences:
    dice = random.Random(seed)
    return read_sequences(drafter, [([dice.randrange(128) for _ in range(n)], min(4, n - 1)) for n in lengths])


@pytest.mark.parametrize("vocab", [None, torch.arange(0, 128, 3)])
def test_room_to_spare_changes_nothing(vocab):
    drafter = make(vocab=vocab)
    sequences = some_sequences(drafter, [70, 3, 130, 41])
    inputs = make_inputs(300, sequences, torch.device("cpu"))
    for part in vars(inputs).values():
        part.fill_(1)  # left by other sequences
    put(sequences, inputs)
    assert inputs.positions[244:].tolist() == list(range(56)) and not inputs.learn[244:].any()
    alone = gradients(drafter, sequences, 4, "soft")
    spare = gradients(drafter, inputs, 4, "soft", torch.arange(300))
    for a, b in zip((*alone.of, alone.numbers), (*spare.of, spare.numbers), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_gradients_are_clipped_together():
    drafter = make()
    found = gradients(drafter, some_sequences(drafter, [60, 60]), 3, "soft")
    norm = float(found.numbers[1])
    clipped = torch.stack([g.norm() for g in found.of]).norm()
    assert norm > CLIP, "or nothing is tested"
    assert float(clipped) == pytest.approx(CLIP, rel=1e-3)


def test_sizes_of_graphs():
    assert [size_of(n) for n in (1, 512, 513, 4096, 4097)] == [SMALLEST, 512, 1024, 4096, 8192]


def test_texts_with_nothing_to_learn_from_change_nothing():
    drafter = make(dtype=torch.float32)
    sequences = some_sequences(drafter, [20])
    sequences.learn[:] = False
    trainer = EagleTrainer(drafter, TrainSettings())
    before = [m.clone() for m in trainer.masters]
    trainer.step(sequences)
    assert trainer.steps == 0 and all(map(torch.equal, before, trainer.masters))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [None, torch.arange(0, 128, 3)])
def test_a_replay_gives_what_the_same_steps_give_one_by_one(dtype, vocab):
    drafter = make("cuda", dtype, vocab)
    graphed = GraphedGradients(drafter, 4, "soft")
    for seed, lengths in enumerate([[70, 3, 130, 41], [500, 300], [10, 490], [400, 2]]):
        sequences = some_sequences(drafter, lengths, seed)
        one, other = gradients(drafter, sequences, 4, "soft"), graphed(sequences)
        for a, b in zip((*one.of, one.numbers[:2]), (*other.of, other.numbers[:2]), strict=True):
            close = 1e-3 if dtype == torch.float32 else 5e-2
            assert float((a - b).norm()) <= close * float(a.norm())
        with torch.no_grad():  # a graph reads the weights as they are when it is replayed
            for param in drafter.parameters():
                param.mul_(0.9)


@pytest.mark.gpu
def test_training_by_graph_learns_and_goes_on_after_a_resume():
    drafter = make("cuda", torch.bfloat16).requires_grad_(False)
    sequences = some_sequences(drafter, [300, 150])
    trainer = EagleTrainer(drafter, TrainSettings(lr=2e-3, runs=3, warmup=1))
    values = [trainer.step(sequences)[0] for _ in range(40)]
    assert values[-1] < 0.9 * values[0]
    again = EagleTrainer(drafter, TrainSettings(lr=2e-3, runs=3, warmup=1))
    again.load(*trainer.state())
    assert again.step(sequences)[0] == pytest.approx(trainer.step(sequences)[0], rel=1e-3)
    assert again.step(sequences)[0] == pytest.approx(trainer.step(sequences)[0], rel=1e-2)
