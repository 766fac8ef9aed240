"""What a pass ends with is the same in one kernel as in twenty operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.kernels import accept

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on = pytest.mark.parametrize("device", DEVICES)
quick = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
given_batches = given(seed=st.integers(0, 10**6), batch=st.integers(1, 5), count=st.sampled_from([1, 2, 5, 63]))


@on
@given_batches
@quick
def test_agreed(device, seed, batch, count):
    from paceline.kernels.accept_triton import count_accepted

    g = torch.Generator().manual_seed(seed)
    winners = torch.randint(0, 3, (batch, count + 1), generator=g)
    guesses = torch.full((batch, count + 4), -1, dtype=torch.int32)[:, 2:-2]  # a part of a wider table
    guesses.copy_(winners[:, :-1])
    some = torch.rand(batch, count, generator=g) < 0.2
    guesses[some] = -1  # what a suffix drafter leaves where it has no guess
    usable = torch.rand(batch, count + 1, generator=g) < 0.9
    expected = []
    for b in range(batch):
        held = 0
        while held < count and guesses[b, held] == winners[b, held] and usable[b, held + 1]:
            held += 1
        expected.append(held)
    assert accept.count_accepted.plain(guesses, winners, usable).tolist() == expected
    assert count_accepted(guesses.to(device), winners.to(device), usable.to(device)).tolist() == expected


@on
@given_batches
@quick
@pytest.mark.parametrize("checked", [False, True])
def test_land(device, checked, seed, batch, count):
    from paceline.kernels.accept_triton import advance_rows

    g = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 9, (batch, 7), generator=g, dtype=torch.int32)
    table[:, 2] = torch.randint(0, 2, (batch,), generator=g)  # slot 0 pads
    drawn = torch.randint(0, 2**31 - 1, (batch, count), generator=g)
    logprobs = -torch.rand(batch, count, generator=g)
    held = torch.randint(0, count, (batch, 3), generator=g)[:, 1] if checked else None

    def run(work, where):
        rows = table.to(where, copy=True)
        columns = (rows[:, i] for i in (0, 1, 2, 5))
        packed = work(*columns, *(None if t is None else t.to(where) for t in (drawn, logprobs, held)))
        return packed.cpu(), rows.cpu()

    packed, rows = run(advance_rows, device)
    for a, b in zip((packed, rows), run(accept.advance_rows.plain, "cpu"), strict=True):
        assert torch.equal(a, b)
    for b in range(batch):
        kept = 0 if held is None else int(held[b])
        moved = kept + 1 if table[b, 2] else 0
        assert rows[b, [0, 1, 5]].tolist() == [drawn[b, kept], table[b, 1] + moved, max(0, table[b, 5] - moved)]
        assert packed[b, :count].tolist() == drawn[b].tolist() and packed[b, -1] == kept
        assert torch.equal(packed[b, count:-1].view(torch.float32), logprobs[b])
    assert torch.equal(rows[:, [2, 3, 4, 6]], table[:, [2, 3, 4, 6]])
