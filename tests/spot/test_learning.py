"""What a worker reads to learn from, and what it does not even run the policy over."""

from __future__ import annotations

import random

import pytest
import torch

import paceline.spot.learning as learning
from paceline.config import SpotConfig
from paceline.draft.eagle.loss import expected_accept_length, read_sequences
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.spot.buffer import ANY_LENGTH, SpotBuffer
from paceline.spot.learning import DrafterLearning
from paceline.spot.samples import FeatureSample, cut, excerpt, lay_out
from paceline.spot.trainer import SpotSettings, SpotTrainer

from ..conftest import tiny_model
from ..draft.test_training import counting_policy

HIDDEN = 48
EACH = 4 + 4 * 4 * HIDDEN  # bytes per token in float32


def tokens_of(length: int, seed: int) -> list[int]:
    rng = random.Random(1000 * length + seed)
    return [rng.randrange(128) for _ in range(length)]


def make(tokens: int, when: str, any_length: float = 0.0) -> DrafterLearning:
    """With capacity for so many tokens, an eighth of it for what is held out."""
    drafter = EagleModel(tiny_model(dtype=torch.float32), DrafterShape(64, 16)).init_weights(0)
    config = SpotConfig(when=when, buffer_mb=tokens * EACH / 2**20)
    spot = DrafterLearning(drafter, config, seed=0)
    spot.buffer = spot.trainer.buffer = SpotBuffer(spot.buffer.max_bytes, any_length)
    return spot


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """Lengths of what the policy was run over."""
    lengths: list[int] = []
    real = learning.read_sequences

    def note(drafter, sequences):
        lengths.extend(len(tokens) for tokens, _ in sequences)
        return real(drafter, sequences)

    monkeypatch.setattr(learning, "read_sequences", note)
    return lengths


def read_all(spot: DrafterLearning) -> None:
    while spot.read_some():
        assert spot.buffer.bytes <= spot.buffer.max_bytes
    assert not spot._unread and not spot._finished


@pytest.mark.parametrize("any_length", [0.0, ANY_LENGTH])
def test_only_what_is_kept_is_read(read, any_length):
    spot = make(1200, "tail", any_length)
    lengths = [30 + 3 * i for i in range(60)]
    random.Random(0).shuffle(lengths)
    for i, length in enumerate(lengths):
        tokens = tokens_of(length, i)
        spot.finished(tokens[:5], tokens[5:])
    read_all(spot)
    samples = spot.buffer.samples
    assert sorted(read) == sorted(map(len, samples)) and sum(read) <= 1200 < sum(lengths) / 5
    kept = sorted(len(s) for s in samples if not s.held_out)
    assert any_length or kept[-5] > 180, "of answers of 30 to 207 tokens; what is left over goes to a shorter one"
    longest = sorted(map(len, spot.buffer._longest.new))
    assert longest[1] > 180
    if any_length:
        assert min(map(len, spot.buffer._any_length.new)) < 150
    for sample in samples:
        wanted = read_sequences(spot.trainer.drafter, [(sample.tokens.tolist(), 5)])
        torch.testing.assert_close(sample.features, wanted.features)
        torch.testing.assert_close(sample.hidden, wanted.hidden)


def test_of_what_is_kept_in_part_only_that_is_read(read):
    spot = make(160, "tail")
    tokens = tokens_of(400, 0)
    spot.finished(tokens[:5], tokens[5:])
    read_all(spot)
    (kept,) = spot.buffer.samples
    assert read == [len(kept)] == [20 if kept.held_out else 140]


def shown(spot: DrafterLearning, sequences, answers) -> None:
    """As the learner shows what it has run the policy over."""
    for i in answers:
        got = read_sequences(spot.trainer.drafter, [sequences[i]])
        spot.on_hidden(i, got.tokens, got.features, got.hidden)


@pytest.mark.parametrize("when", ["tail", "update"])
def test_what_the_learner_is_asked_to_show(when):
    spot = make(8000, when)
    sequences = {i: (tokens_of(20 + i, i), 5) for i in range(40)}
    lengths = [len(tokens) - prompt for tokens, prompt in sequences.values()]
    spot.begin_update(lengths, sequences, first=True)
    wanted = [i for i in sequences if spot.wants_hidden(i)]
    assert wanted == list(range(40) if when == "update" else range(19, 40))
    shown(spot, sequences, wanted)
    assert len(spot.buffer) == len(wanted)
    spot.begin_rollout(new_step=True)
    assert sorted(len(s) for s in spot.buffer.samples) == list(range(40, 60)), "the longer half, either way"


def test_an_update_that_is_made_again_keeps_nothing_twice():
    """A worker died on the way, and the others have more to do."""
    spot = make(8000, "update")
    sequences = {i: (tokens_of(20 + i, i), 5) for i in range(12)}
    lengths = [len(tokens) - prompt for tokens, prompt in sequences.values()]
    first = {i: sequences[i] for i in range(4)}
    spot.begin_update(lengths, first, first=True)
    shown(spot, sequences, [0, 1])
    spot.begin_update(lengths, first, first=True)
    shown(spot, sequences, range(4))
    spot.begin_update(lengths, {i: sequences[i] for i in (4, 5, 6, 7)}, first=False)
    shown(spot, sequences, [4, 5])
    spot.begin_update(lengths, {i: sequences[i] for i in (4, 5, 6, 8)}, first=False)
    assert [i for i in sequences if spot.wants_hidden(i)] == [6, 8], "4 and 5 are there"
    shown(spot, sequences, [4, 5, 6, 8])
    assert sorted(len(s) for s in spot.buffer.samples) == [20, 21, 22, 23, 24, 25, 26, 28]
    assert spot.buffer.bytes == sum(s.bytes for s in spot.buffer.samples), (
        "and nothing is reserved for the one that went"
    )


def sample(length: int, prompt: int) -> FeatureSample:
    numbers = torch.arange(length)
    return FeatureSample(
        numbers.int(), prompt, numbers[:, None] * torch.ones(1, 6), numbers[:, None] * torch.ones(1, 2)
    )


@pytest.mark.parametrize(("length", "prompt"), [(900, 10), (900, 600), (129, 128), (131, 4), (128, 4), (4000, 2000)])
def test_all_of_a_long_answer_is_learned_from_in_pieces(length, prompt):
    whole, size, rng = sample(length, prompt), 128, random.Random(3)
    learned: set[int] = set()
    for _ in range(12):
        pieces = cut(whole, size, rng)
        assert pieces and all(p.prompt < len(p) <= size for p in pieces)
        for piece in pieces:
            learn = lay_out([piece]).learn
            first = int(piece.tokens[0])
            assert torch.equal(piece.features[:, 0], piece.tokens.float())
            assert first == 0 or not learn[0], "what the policy thought before it is not known"
            learned |= {first + i for i in learn.nonzero()[:, 0].tolist()}
    assert learned == set(range(prompt - 1, length - 1)), "and nothing but the answer"


def test_drafters_are_judged_by_parts_of_long_answers():
    for length, prompt in ((50, 10), (900, 10), (900, 880), (130, 129)):
        part = excerpt(sample(length, prompt), 128)
        assert part.prompt < len(part) <= 128 and int(part.tokens[-1]) < length
        assert torch.equal(part.tokens, excerpt(sample(length, prompt), 128).tokens)


def test_an_answer_longer_than_all_that_is_judged_is_judged_by_a_part():
    drafter = EagleModel(counting_policy(), DrafterShape(64, 32)).init_weights(0, std=0.1)
    buffer = SpotBuffer(2**24)
    spot = SpotTrainer(drafter, buffer, settings=SpotSettings(eval_tokens=240))
    for start in range(48):
        tokens = [(start + i) % 48 for i in range(250)]
        got = read_sequences(drafter, [(tokens, 4)])
        buffer.begin_again()
        buffer.put(FeatureSample(got.tokens.int(), 4, got.features, got.hidden))
        if buffer.samples[0].held_out:
            break
    evaluation = spot.evaluate()
    assert 50 < evaluation.tokens <= 60 and evaluation.before == pytest.approx(evaluation.after)


def test_a_piece_is_judged_as_the_same_tokens_of_the_whole():
    """Where they lie in the sequence is nothing that a drafter knows; its window is all that it sees."""
    drafter = EagleModel(tiny_model(dtype=torch.float64), DrafterShape(64, 16)).init_weights(0, std=0.1)
    got = read_sequences(drafter, [(tokens_of(300, 0), 5)])
    whole = FeatureSample(got.tokens.int(), 5, got.features, got.hidden)
    late, piece = lay_out([whole]), lay_out([whole.part(120, 200, 2)])
    late.learn &= (late.positions >= 150) & (late.positions < 199)
    piece.learn &= piece.positions >= 30
    assert piece.learn.sum() == late.learn.sum() == 49
    assert expected_accept_length(drafter, piece, 1) == pytest.approx(
        expected_accept_length(drafter, late, 1), abs=1e-9
    )


def test_the_learner_is_not_asked_for_an_answer_that_had_to_leave():
    """All are asked about before the first is computed, so what the policy runs over for the buffer stays there."""
    spot = make(1200, "update", ANY_LENGTH)
    sequences = {i: (tokens_of(30 + 3 * i, i), 5) for i in range(60)}
    spot.begin_update([len(tokens) - 5 for tokens, _ in sequences.values()], sequences, first=True)
    assert any(entry.evicted for entry in spot._entries.values()), "some left for one with a higher hash"
    wanted = [i for i in sequences if spot.wants_hidden(i)]
    shown(spot, sequences, sequences)
    assert sorted(len(spot._entries[i]) for i in wanted) == sorted(map(len, spot.buffer.samples))
