"""A drafter can propose all tokens of a small vocabulary, and of a large one those that are likely to come."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from paceline.draft.eagle.vocabulary import (
    DRAFT_VOCAB,
    LAST,
    MIN_DRAFT_VOCAB,
    RARE,
    choose_tokens,
    draft_vocab_size,
    enough,
)
from paceline.model import Decoder

from ..conftest import tiny_model


def policy_of(vocab_size: int, eos_ids: tuple[int, ...] = ()) -> Decoder:
    with torch.device("meta"):
        policy = Decoder(replace(tiny_model().config, vocab_size=vocab_size, eos_ids=eos_ids))
    return policy.to_empty(device="cpu")


@pytest.mark.parametrize(
    ("vocab_size", "wanted", "count"),
    [(104, None, 104), (104, 25, 25), (104, 1000, 104), (65536, None, 65536), (152064, None, DRAFT_VOCAB)],
)
def test_how_many(vocab_size, wanted, count):
    assert draft_vocab_size(vocab_size, wanted) == count


def zipf(tokens: int, words: int, seed: int = 0) -> Counter[int]:
    """Sequences as languages have them: the second most frequent word comes half as often as the first, and so on."""
    chances = 1 / torch.arange(1, words + 1, dtype=torch.float64)
    drawn = torch.multinomial(chances, tokens, replacement=True, generator=torch.Generator().manual_seed(seed))
    return Counter(drawn.tolist())


def test_answers_show_how_many_are_enough():
    assert draft_vocab_size(152064, None, Counter({5: 1000, 6: 900})) == MIN_DRAFT_VOCAB
    assert draft_vocab_size(152064, 500, Counter({5: 1000, 6: 900})) == 500, "what is wanted counts more"
    assert draft_vocab_size(152064, None, Counter()) == DRAFT_VOCAB
    written = zipf(2_000_000, 20_000)
    count = enough(written)
    assert MIN_DRAFT_VOCAB < count < len(written)
    kept = {token for token, _ in written.most_common(count)}
    later = zipf(200_000, 20_000, seed=1)
    rare = sum(times for token, times in later.items() if token not in kept) / later.total()
    assert 0.5 * RARE < rare < 1.1 * RARE, "of what is written later"


def test_few_answers_show_nothing():
    assert enough(zipf(20_000, 20_000)) == DRAFT_VOCAB


def test_all_of_a_small_vocabulary():
    assert choose_tokens(policy_of(500), written=[3, 4]) is None
    assert choose_tokens(policy_of(500), 600) is None


def test_the_most_frequent_come_first():
    chosen = choose_tokens(policy_of(500), 3, [7, 400, 7, 9, 400, 7, 8, 9, 400, 7])
    assert chosen is not None and chosen.tolist() == [7, 9, 400]


def test_of_a_large_vocabulary_nothing_is_known_about():
    """What ends an answer, the special ones at the end, and the first ones."""
    chosen = choose_tokens(policy_of(100_000, eos_ids=(60_000,)))
    assert chosen is not None and len(chosen) == len(set(chosen.tolist())) == DRAFT_VOCAB
    here = set(chosen.tolist())
    assert {0, 60_000, 99_999, 100_000 - LAST} <= here
    assert chosen.tolist() == sorted(here), "maps of checkpoints want them in order"
    assert 50_000 not in here and max(t for t in here if t < 60_000) == DRAFT_VOCAB - LAST - 2
