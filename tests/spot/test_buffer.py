"""What is kept to learn from: this step's answers and the longest of the step before, decided before it is copied.

Tests of which answers are the longest give all of the capacity to them; others leave a part to answers of any
length."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.draft.eagle.loss import batches
from paceline.errors import UserError
from paceline.spot.buffer import ANY_LENGTH, HELD_OUT, SpotBuffer
from paceline.spot.samples import FeatureSample

WIDTH = 4
EACH = 4 + 4 * 3 * WIDTH + 4 * WIDTH  # bytes per token in float32
CAPACITY = 1600 * EACH  # for 1,400 tokens, and for 200 that are held out


def tokens_of(length: int, held_out: bool = False) -> torch.Tensor:
    """A sequence of this length that is held out, or one that is not."""
    for first in itertools.count():
        tokens = torch.full((length,), 7, dtype=torch.int32)
        tokens[0] = first
        if (zlib.crc32(tokens.numpy().tobytes()) % HELD_OUT == 0) == held_out:
            return tokens
    raise AssertionError


def answer(length: int, prompt: int = 3, mark: float = 0.0, held_out: bool = False) -> FeatureSample:
    features = torch.full((length, 3 * WIDTH), mark)
    return FeatureSample(tokens_of(length, held_out), prompt, features, torch.full((length, WIDTH), mark))


def lengths(buffer: SpotBuffer) -> list[int]:
    return [len(s) for s in buffer.samples]


def real_bytes(buffer: SpotBuffer) -> int:
    return sum(t.untyped_storage().nbytes() for s in buffer.samples for t in (s.tokens, s.features, s.hidden))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.one_of(st.tuples(st.integers(10, 10_000), st.booleans()), st.sampled_from(["next", "again"])), max_size=60
    ),
    st.integers(1, 12_000),
    st.sampled_from([0.0, ANY_LENGTH]),
)
@example([(10, False), (10_000, False), "next", (10_000, False), (10, True), "again", (5_000, True)], 12_000, 0.0)
def test_never_more_bytes_than_it_may_have_and_no_longer_one_goes_for_a_shorter(history, capacity, any_length):
    buffer = SpotBuffer(capacity * EACH, any_length)
    for event in history:
        before = buffer._longest.new + buffer._held_out.new
        others = list(buffer._any_length.new)
        if event == "next":
            buffer.next_step()
        elif event == "again":
            buffer.begin_again()
        else:
            length, held_out = event
            kept = buffer.put(answer(length, held_out=held_out))
            after = buffer._longest.new + buffer._held_out.new
            gone = [e for e in before if e not in after]
            assert kept or not gone, "nothing goes for what is not kept"
            assert all(e.length < length and e.held_out == held_out for e in gone)
            assert all(e.evicted != (e in buffer._any_length.new) for e in gone), "unless it is one of any length"
            ranks = [e.hash for e in buffer._any_length.new if e not in others]
            assert all(e.hash < max(ranks) for e in others if e.evicted), "where hashes decide, not lengths"
        assert buffer.bytes == sum(s.bytes for s in buffer.samples) == real_bytes(buffer) <= buffer.max_bytes
    packs = list(batches(buffer.samples, 4096, random.Random(0).shuffle, len))
    assert sorted(id(s) for pack in packs for s in pack) == sorted(id(s) for s in buffer.samples)
    assert all(len(pack) == 1 or sum(map(len, pack)) <= 4096 for pack in packs)


def test_this_step_and_the_longest_of_the_step_before():
    buffer = SpotBuffer(CAPACITY, any_length=0.0)
    for length in (10, 400, 20, 300):
        buffer.put(answer(length, mark=1.0))
    buffer.next_step()
    assert lengths(buffer) == [300, 400], "the longest half"
    assert buffer.put(answer(250)) and buffer.put(answer(350)) and lengths(buffer) == [300, 400, 250, 350]
    assert buffer.put(answer(320)) and lengths(buffer) == [400, 250, 350, 320], "an old one that is shorter goes"
    assert not buffer.put(answer(200)) and lengths(buffer) == [400, 250, 350, 320]
    assert buffer.put(answer(260)) and lengths(buffer) == [400, 350, 320, 260], "then a shorter one of this step"
    buffer.begin_again()
    assert lengths(buffer) == [400]
    for length in (200, 300, 600):
        assert buffer.put(answer(length))
    assert lengths(buffer) == [200, 300, 600], "all of this step come now, so what is old goes first"
    assert buffer.put(answer(500)) and lengths(buffer) == [300, 600, 500]
    buffer.next_step()
    buffer.next_step()
    assert len(buffer) == 0 and buffer.bytes == 0


def test_early_answers_are_short_and_leave_half_of_the_room_to_the_long_ones_of_the_step_before():
    buffer = SpotBuffer(CAPACITY, any_length=0.0)
    for length in (420, 450, 460, 5, 6, 7):
        assert buffer.put(answer(length, mark=1.0))
    buffer.next_step()
    assert lengths(buffer) == [420, 450, 460]
    assert [buffer.put(answer(length)) for length in range(70, 54, -1)] == [True] * 7 + [False] * 9
    assert lengths(buffer) == [450, 460, *range(70, 63, -1)]
    assert buffer.put(answer(451)) and lengths(buffer) == [460, *range(70, 63, -1), 451], "one of its own"
    buffer.begin_again()
    for length in range(106, 92, -1):
        assert buffer.put(answer(length))
    assert lengths(buffer) == list(range(106, 92, -1))


def test_half_of_what_the_step_had_is_kept_not_half_of_what_fits():
    """Where only the longest fit, all of them are among the longer half."""
    buffer = SpotBuffer(CAPACITY, any_length=0.0)
    for length in (*range(410, 380, -10), *range(200, 20, -10)):
        buffer.put(answer(length))
    kept = lengths(buffer)
    assert kept == [410, 400, 390, 200]
    buffer.next_step()
    assert sorted(lengths(buffer)) == sorted(kept)


def test_an_answer_larger_than_the_room_is_kept_as_far_as_it_fits():
    buffer = SpotBuffer(80 * EACH, any_length=0.0)
    assert buffer.put(answer(1000, mark=2.0)) and lengths(buffer) == [70]
    assert buffer.put(answer(1000, held_out=True)) and sorted(lengths(buffer)) == [10, 70]
    assert not buffer.put(answer(999)), "the first of one that is shorter is not better"
    assert buffer.put(answer(1001)) and sorted(lengths(buffer)) == [10, 70] and buffer.samples[-1].features[0, 0] == 0
    assert sorted(s.held_out for s in buffer.samples) == [False, True]
    assert buffer.bytes == real_bytes(buffer) == 80 * EACH


def test_an_answer_cut_down_to_its_prompt_teaches_nothing():
    buffer = SpotBuffer(5 * EACH, any_length=0.0)
    assert not buffer.put(answer(100, prompt=5))
    assert len(buffer) == 0 and buffer.bytes == 0 and buffer.seen == 1
    with pytest.raises(UserError, match="has no capacity"):
        SpotBuffer(0)


def test_room_that_was_made_and_is_not_used_is_given_back():
    buffer = SpotBuffer(80 * EACH, any_length=0.0)
    width = EACH - 4
    first = buffer.reserve(tokens_of(40), 3, width)
    assert first and buffer.bytes == 40 * EACH and len(buffer) == 0
    second = buffer.reserve(tokens_of(50), 3, width)
    assert second and first.evicted, "a longer one came before it was there"
    buffer.fill(first, torch.empty(40, 3 * WIDTH, device="meta"), torch.empty(40, WIDTH, device="meta"))
    buffer.give_back(first)
    buffer.give_back(second)
    assert buffer.bytes == 0 and len(buffer) == 0
    third = buffer.reserve(tokens_of(60), 3, width)
    buffer.next_step()
    assert third and third.evicted and buffer.bytes == 0, "what never came is not old either"


HIDDEN, TAPS = 3584, 3  # of a model of 7B parameters
WIDE = 2 * (TAPS + 1) * HIDDEN  # bytes per token in bfloat16, beside the token itself


def long_tail(seed: int, count: int = 128, longest: int = 2541) -> list[torch.Tensor]:
    """Sequences of a step: most are short, some are not."""
    g = torch.Generator().manual_seed(seed)
    sizes = (torch.empty(count).log_normal_(5.6, 0.9, generator=g)).clamp(60, longest).int().tolist()
    sizes[count // 2] = longest
    return [torch.randint(0, 150_000, (n,), generator=g, dtype=torch.int32) for n in sizes]


class Shown(torch.Tensor):
    """The features of a sequence; records when they are copied, and how many of them."""

    copied: list[int] = []  # noqa: RUF012 (of all of them)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            Shown.copied.append(args[0].numel() * args[0].element_size())
        return super().__torch_function__(func, types, args, kwargs or {})


def thoughts(count: int, fill: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and hidden states that take no memory until they are copied."""
    one = torch.full((1, 1), fill, dtype=torch.bfloat16)
    return one.expand(count, TAPS * HIDDEN).as_subclass(Shown), one.expand(count, HIDDEN).as_subclass(Shown)


@pytest.mark.parametrize("any_length", [0.0, ANY_LENGTH])
@pytest.mark.parametrize("order", ["longest first", "shortest first", "as they come"])
def test_at_the_size_of_a_7b_the_longest_are_kept_and_nothing_is_copied_in_vain(order, any_length):
    """256 MB hold 9,362 tokens of 128 answers of up to 2,541."""
    sequences = long_tail(0)
    if order != "as they come":
        sequences.sort(key=len, reverse=order == "longest first")
    assert sum(map(len, sequences)) > 4 * 9362
    buffer = SpotBuffer(256 * 2**20, any_length)
    Shown.copied.clear()
    for tokens in sequences:
        entry = buffer.reserve(tokens, 50, WIDE)
        assert real_bytes(buffer) + (entry.bytes if entry else 0) <= buffer.max_bytes, "before the copy, too"
        if entry is None:  # what cannot be copied, for there is nothing there
            features, hidden = (torch.empty(len(tokens), n * HIDDEN, device="meta") for n in (TAPS, 1))
            assert not buffer.put(FeatureSample(tokens, 50, features.bfloat16(), hidden.bfloat16()))
            continue
        buffer.fill(entry, *thoughts(len(tokens)))
        assert real_bytes(buffer) == buffer.bytes <= buffer.max_bytes
    kept = sorted(lengths(buffer), reverse=True)
    others = sorted((len(t) for t in sequences if zlib.crc32(t.numpy().tobytes()) % HELD_OUT), reverse=True)
    assert kept[0] == others[0] == 2541
    for longest in range(3):
        assert others[longest] in kept, "no longer one is missing"
    assert buffer.tokens > (0.8 if any_length else 0.85) * 9362, "each part has a rest"
    judged = [s for s in buffer.samples if s.held_out]
    assert judged and sum(map(len, judged)) > 0.6 * 9362 / HELD_OUT, "something to judge by"
    if order == "longest first" and not any_length:
        assert sum(Shown.copied) == sum(s.features.nbytes + s.hidden.nbytes for s in buffer.samples)


def test_a_quarter_is_for_answers_of_any_length():
    """Where not all fit, those that are not among the longest are chosen by hash, so theirs are lengths like any."""
    longest, others, dropped = [], [], []
    for seed in range(20):
        sequences = long_tail(seed)
        buffer = SpotBuffer(256 * 2**20, ANY_LENGTH)
        entries = [buffer.reserve(tokens, 50, WIDE) for tokens in sequences]
        kept = [e for e in entries if e and not e.evicted and not e.held_out]
        assert set(kept) == {*buffer._longest.new, *buffer._any_length.new}
        assert 0.5 < buffer._any_length.bytes / buffer._any_length.max_bytes <= 1
        longest += [e.length for e in buffer._longest.new]
        others += [e.length for e in buffer._any_length.new]
        known = {tuple(e.tokens.tolist()) for e in entries if e and not e.evicted}
        dropped += [len(t) for t in sequences if tuple(t.tolist()) not in known]
    median = [sorted(part)[len(part) // 2] for part in (longest, others, dropped)]
    assert median[0] > 3 * median[1] and 0.6 < median[1] / median[2] < 1.6, median


def test_where_all_fit_all_are_kept_and_the_longest_half_goes_on():
    buffer = SpotBuffer(CAPACITY, ANY_LENGTH)
    for length in (10, 400, 20, 300, 500):
        assert buffer.put(answer(length))
    assert sorted(lengths(buffer)) == [10, 20, 300, 400, 500]
    assert buffer._any_length.new, (
        "three quarters of the capacity hold the longest, the rest is among those of any length"
    )
    buffer.next_step()
    assert sorted(lengths(buffer)) == [300, 400, 500]


def test_something_is_held_out_at_the_size_of_a_7b_whatever_the_answers_are():
    for seed in range(20):
        buffer = SpotBuffer(256 * 2**20)
        for tokens in sorted(long_tail(seed), key=len, reverse=True):
            buffer.reserve(tokens, 50, WIDE)
        assert buffer._held_out.new and buffer._longest.new and buffer.bytes <= buffer.max_bytes


def test_of_an_answer_larger_than_the_room_nothing_else_is_copied():
    buffer = SpotBuffer(16 * 2**20, any_length=0.0)
    tokens = tokens_of(20_000)
    Shown.copied.clear()
    entry = buffer.reserve(tokens, 50, WIDE)
    assert entry and len(entry) == 14 * 2**20 // (WIDE + 4)
    buffer.fill(entry, *thoughts(len(tokens), 1.0))
    assert sum(Shown.copied) == len(entry) * WIDE
    assert real_bytes(buffer) == entry.bytes <= buffer.max_bytes
