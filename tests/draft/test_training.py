"""Training sees what drafting will see: the right features beside the right tokens, and nobody else's."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.draft.eagle.loss import PackedSequences, UnrolledAttention, batches, read_sequences, unrolled_loss
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.eagle.trainer import EagleTrainer, TrainSettings

from ..conftest import tiny_model


def test_attention_over_runs_is_what_its_docstring_says():
    torch.manual_seed(0)
    lengths, window, heads, kv, d = [70, 200, 31, 130], 40, 4, 2, 8
    place = torch.cat([torch.arange(n) for n in lengths])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    n = len(place)
    attention = UnrolledAttention(place, window)
    runs = []
    for run in range(4):
        q, k, v = (torch.randn(n, h, d, dtype=torch.float64) for h in (heads, kv, kv))
        runs.append((k, v))
        got = attention(0, q, k, v).view(n, heads, d)
        for i in random.Random(run).sample(range(n), 60):
            if place[i] < run:
                continue  # there is no draft token that far from the features
            seen = [(0, j) for j in range(max(0, i - window + 1), i - run + 1) if sequence[j] == sequence[i]]
            seen += [(r, i - run + r) for r in range(1, run + 1)]
            for h in range(heads):
                keys = torch.stack([runs[r][0][j, h * kv // heads] for r, j in seen])
                values = torch.stack([runs[r][1][j, h * kv // heads] for r, j in seen])
                expected = (keys @ q[i, h] * d**-0.5).softmax(0) @ values
                torch.testing.assert_close(got[i, h], expected)


def counting_policy():
    """A policy that surely writes t + 1 after t: its hidden state is made to point at the next token."""
    model = tiny_model(dtype=torch.float32, vocab_size=48, hidden_size=48)
    with torch.no_grad():
        for layer in model.layers:
            layer.o.zero_()
            layer.down.zero_()
        model.embed.weight.copy_(torch.eye(48))
        model.norm.fill_(1.0)
        model.head.weight.copy_(3 * torch.eye(48).roll(1, 0))
    return model


def test_learns_a_policy_whose_next_token_is_known():
    """Off by one anywhere, between tokens, features and targets, and the right draft token could not be known."""
    model = counting_policy()
    drafter = EagleModel(model, DrafterShape(64, 32)).init_weights(0, std=0.1)
    dice = random.Random(0)
    answers = []
    for _ in range(40):
        start = dice.randrange(48)
        answers.append(([(start + i) % 48 for i in range(dice.randint(12, 40))], 4))
    trainer = EagleTrainer(drafter, TrainSettings(lr=5e-3, runs=3))
    for _ in range(12):
        for batch in batches(answers, 600, dice.shuffle, lambda answer: len(answer[0])):
            _, agree = trainer.step(read_sequences(drafter, batch))
    assert min(agree) > 0.95
    trainer.publish()
    assert torch.equal(drafter.fc, trainer.copy.fc)


def test_texts_do_not_see_each_other():
    model = tiny_model(dtype=torch.float64)
    drafter = EagleModel(model, DrafterShape(64, 16)).init_weights(1, std=0.2)
    dice = random.Random(3)
    a, b = ([dice.randrange(128) for _ in range(n)] for n in (50, 33))
    together = read_sequences(drafter, [(a, 5), (b, 7)])
    for sequence, prompt, part in ((a, 5, slice(0, 50)), (b, 7, slice(50, 83))):
        alone = read_sequences(drafter, [(sequence, prompt)])
        for name in ("tokens", "positions", "features", "hidden", "learn"):
            torch.testing.assert_close(getattr(together, name)[part], getattr(alone, name))
    whole, _ = unrolled_loss(drafter, together, 3, "soft")
    first, _ = unrolled_loss(drafter, read_sequences(drafter, [(a, 5)]), 3, "soft")
    changed = PackedSequences(**{k: v.clone() for k, v in vars(together).items()})
    changed.learn[50:] = False
    masked, _ = unrolled_loss(drafter, changed, 3, "soft")
    torch.testing.assert_close(masked, first)
    assert not torch.isclose(whole, first)


@pytest.mark.parametrize("mine", [0, 1, 2])
def test_nothing_in_a_pack_reaches_another_text(mine):
    """What is learned from one sequence depends on no feature and no token of the others, before it or behind it."""
    model = tiny_model(dtype=torch.float64)
    drafter = EagleModel(model, DrafterShape(64, 300)).init_weights(1, std=0.2)  # a window longer than any sequence
    dice, lengths = random.Random(3), [150, 3, 140]  # the last one lies across two blocks of attention
    sequences = read_sequences(drafter, [([dice.randrange(128) for _ in range(n)], 1) for n in lengths])
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    sequences.learn &= owner == mine
    sequences.features.requires_grad_(True)
    before, _ = unrolled_loss(drafter, sequences, 4, "soft")
    before.backward()
    reached = sequences.features.grad.abs().sum(-1) > 0
    assert bool(reached[owner == mine][:-2].all()), "of its own, all but the last, which nothing follows"
    assert not bool(reached[owner != mine].any())
    changed = PackedSequences(**{name: tensor.detach().clone() for name, tensor in vars(sequences).items()})
    others = owner != mine
    changed.tokens[others] = (changed.tokens[others] + 1) % 128
    changed.features[others] += 1.0
    changed.hidden[others] -= 1.0
    after, _ = unrolled_loss(drafter, changed, 4, "soft")
    assert torch.equal(before.detach(), after)


@pytest.mark.parametrize("loss", ["soft", "overlap"])
def test_both_losses_go_down(loss):
    model = tiny_model(dtype=torch.float32)
    drafter = EagleModel(model, DrafterShape(64, 32)).init_weights(0, std=0.1)
    dice = random.Random(0)
    answers = [([dice.randrange(128) for _ in range(60)], 3) for _ in range(8)]
    trainer = EagleTrainer(drafter, TrainSettings(lr=5e-3, loss=loss, runs=2, warmup=1))
    values = [trainer.step(read_sequences(drafter, answers))[0] for _ in range(30)]
    assert values[-1] < 0.9 * values[0]
