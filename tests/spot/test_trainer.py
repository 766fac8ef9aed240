from __future__ import annotations

import itertools
import random

import pytest
import torch

from paceline.draft.eagle.loss import expected_accept_length, read_sequences
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.eagle.trainer import TrainSettings
from paceline.spot.buffer import SpotBuffer
from paceline.spot.samples import FeatureSample, lay_out
from paceline.spot.trainer import SpotTrainer

from ..draft.test_training import counting_policy

FAST = TrainSettings(lr=5e-3, runs=3, warmup=1)


def counted(drafter: EagleModel, count: int, seed: int = 0, prompt: int = 4):
    """Answers of a policy that counts, with its features."""
    rng = random.Random(seed)
    for _ in range(count):
        start, length = rng.randrange(48), rng.randint(12, 40)
        tokens = [(start + i) % 48 for i in range(length)]
        sequences = read_sequences(drafter, [(tokens, prompt)])
        yield FeatureSample(sequences.tokens.int(), prompt, sequences.features, sequences.hidden)


@pytest.fixture
def spot() -> SpotTrainer:
    drafter = EagleModel(counting_policy(), DrafterShape(64, 32)).init_weights(0, std=0.1)
    buffer = SpotBuffer(2**24)
    for sample in counted(drafter, 60):
        buffer.put(sample)
    return SpotTrainer(drafter, buffer, FAST)


def rounds(count: int):
    """Go on for so many steps."""
    left = itertools.chain([True] * count, itertools.repeat(False))
    return lambda: next(left)


def test_what_the_buffer_gives_back_is_what_the_policy_thought(spot):
    samples = spot.buffer.samples[:5]
    again = read_sequences(spot.drafter, [(s.tokens.tolist(), s.prompt) for s in samples])
    sequences = lay_out(samples)
    for name in ("tokens", "positions", "features", "hidden", "learn"):
        torch.testing.assert_close(getattr(sequences, name), getattr(again, name))


def test_learns_a_policy_whose_next_token_is_known_and_publishes_it(spot):
    """Off by one anywhere between tokens and features, and the right draft token could not be known."""
    before = spot.evaluate()
    stats = spot.train(rounds(120))
    old, new, _ = spot.evaluate()
    assert before[0] == old < 1.5 and new > 3.5, "of at most four"
    assert stats.steps == 120 and stats.tokens > 0 and stats.loss < 1
    untouched = spot.drafter.fc.clone()
    assert spot.publish().better and spot.version == 1
    assert not torch.equal(spot.drafter.fc, untouched)
    assert spot.evaluate()[0] == pytest.approx(new)
    assert spot.publish() is None and spot.version == 1, "nothing was trained since"


def test_training_does_not_touch_the_drafter_that_proposes(spot):
    before = {k: v.clone() for k, v in spot.drafter.state_dict().items()}
    spot.train(rounds(6))
    assert all(torch.equal(v, before[k]) for k, v in spot.drafter.state_dict().items())


def test_a_worse_drafter_is_not_published():
    drafter = EagleModel(counting_policy(), DrafterShape(64, 32)).init_weights(0, std=0.1)
    buffer = SpotBuffer(2**24)
    for sample in counted(drafter, 60):
        buffer.put(sample)
    good = SpotTrainer(drafter, buffer, FAST)
    good.train(rounds(60))
    assert good.publish().better
    best = drafter.fc.clone()
    bad = SpotTrainer(drafter, buffer, TrainSettings(lr=3.0, runs=3, warmup=1))
    bad.train(rounds(10))
    old, new, _ = bad.evaluate()
    assert new < old and not bad.publish().better and bad.version == 0
    assert torch.equal(drafter.fc, best)
    assert bad.evaluate()[1] == pytest.approx(old), "and training goes on from the last version"


def test_a_loss_that_is_not_finite_is_thrown_away(spot):
    for sample in spot.buffer.samples:
        sample.features.fill_(float("nan"))
    before = spot._optimizer.copy.fc.clone()
    stats = spot.train(rounds(4))
    assert stats.steps == 0 and stats.discarded == 4
    assert torch.equal(spot._optimizer.copy.fc, before) and spot.publish() is None


def test_with_a_reduced_vocabulary_training_sees_the_head_that_the_policy_has_now():
    policy, vocab = counting_policy(), torch.arange(0, 48, 2)
    drafter = EagleModel(policy, DrafterShape(64, 32), vocab).init_weights(0, std=0.1)
    spot = SpotTrainer(drafter, SpotBuffer(2**24), FAST)
    for sample in counted(drafter, 20):
        spot.buffer.put(sample)
    spot.train(rounds(1))
    policy.head.weight.data.mul_(0.5)  # the policy has learned
    spot.train(rounds(1))
    assert torch.equal(spot._optimizer.copy.head(), policy.head.weight[vocab])


def test_nothing_to_learn_from_ends_training_at_once():
    drafter = EagleModel(counting_policy(), DrafterShape(64, 32)).init_weights(0, std=0.1)
    stats = SpotTrainer(drafter, SpotBuffer(2**20), FAST).train(lambda: True)
    assert stats.steps == 0 and stats.seconds == 0


def test_steps_come_to_take_the_time_that_is_set(spot):
    """A machine whose clock goes by tokens: 1,000 a second, and a tenth of a second per step on top."""
    now, sizes = 0.0, []
    begin = spot._optimizer.begin

    def slow(sequences, progress=0.0):
        nonlocal now
        now += 0.1 + len(sequences.tokens) / 1000
        sizes.append(len(sequences.tokens))
        begin(sequences, progress)

    spot._optimizer.begin, spot._clock, spot.step_size.step_s = slow, lambda: now, 0.35
    spot.train(rounds(60))
    assert 180 <= sum(sizes[-10:]) / 10 <= 260, "0.35 s are 250 tokens, less what does not fit a pack"
    assert max(0.1 + n / 1000 for n in sizes[5:]) < 0.5


def test_steps_do_not_shrink_where_that_saves_no_time(spot):
    """A machine that takes a fifth of a second for a step of any size, though a twentieth is asked for."""
    now, sizes = 0.0, []
    begin = spot._optimizer.begin

    def slow(sequences, progress=0.0):
        nonlocal now
        now += 0.2
        sizes.append(len(sequences.tokens))
        begin(sequences, progress)

    spot._optimizer.begin, spot._clock, spot.step_size.step_s = slow, lambda: now, 0.05
    spot.step_size.tokens = 1024.0
    spot.train(rounds(40))
    assert sum(sizes[-20:]) / 20 > 500


def test_expected_accept_length_of_a_drafter_that_knows_and_of_one_that_does_not(spot):
    sequences = lay_out(spot.buffer.samples)
    chance = 1 + sum((1 / 48) ** k for k in (1, 2, 3))
    spot.drafter.norm.data.zero_()  # every token is as likely as any other
    assert expected_accept_length(spot.drafter, sequences, 3) == pytest.approx(chance, abs=0.02)
