from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.draft.training import batches
from paceline.errors import UserError
from paceline.spot.buffer import Sample, SpotBuffer

WIDTH = 4
EACH = 4 + 4 * 3 * WIDTH + 4 * WIDTH  # bytes per token in float32


def answer(length: int, prompt: int = 3, mark: float = 0.0):
    return Sample(
        torch.full((length,), 7, dtype=torch.int32),
        prompt,
        torch.full((length, 3 * WIDTH), mark),
        torch.full((length, WIDTH), mark),
    )


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.one_of(st.integers(10, 10_000), st.none()), max_size=60),
    st.integers(1, 12_000),
)
@example([10, 10_000, None, 10_000, 10, 5_000, 10], 12_000)  # both ends, whatever is drawn
def test_never_more_bytes_than_it_may_have(history, room):
    buffer = SpotBuffer(room * EACH)
    for length in history:
        if length is None:
            buffer.next_step()
        else:
            buffer.put(answer(length))
        real = sum(t.untyped_storage().nbytes() for s in buffer.samples for t in (s.tokens, s.features, s.hidden))
        assert buffer.bytes == sum(s.bytes for s in buffer.samples) == real <= buffer.max_bytes
        if length is not None and min(length, room) > 3:
            assert len(buffer.samples[-1]) == min(length, room), "the newest is always there, as far as it fits"
    packs = list(batches(buffer.samples, 4096, random.Random(0).shuffle, len))
    assert sorted(id(s) for pack in packs for s in pack) == sorted(id(s) for s in buffer.samples)
    assert all(len(pack) == 1 or sum(map(len, pack)) <= 4096 for pack in packs)


def test_the_longest_of_the_step_before_stay_until_there_is_no_room():
    buffer = SpotBuffer(1000 * EACH)
    for length in (10, 400, 20, 300):
        buffer.put(answer(length, mark=1.0))
    buffer.next_step()
    assert [len(s) for s in buffer.samples] == [300, 400]
    buffer.put(answer(250))
    assert [len(s) for s in buffer.samples] == [300, 400, 250]
    buffer.put(answer(300))
    assert [len(s) for s in buffer.samples] == [400, 250, 300], "the shorter of the old ones goes first"
    buffer.put(answer(600))
    assert [len(s) for s in buffer.samples] == [300, 600], "then what came first in this step"
    buffer.next_step()
    buffer.next_step()
    assert len(buffer) == 0 and buffer.bytes == 0 and buffer.seen == 7


def test_an_answer_cut_down_to_its_prompt_teaches_nothing():
    buffer = SpotBuffer(5 * EACH)
    buffer.put(answer(100, prompt=5))
    assert len(buffer) == 0 and buffer.bytes == 0
    with pytest.raises(UserError, match="needs room"):
        SpotBuffer(0)
