"""Counting accepted draft tokens and advancing the rows: the kernels equal the references and the definition."""

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
def test_count_accepted(device, seed, batch, count):
    from paceline.kernels.accept_triton import count_accepted

    g = torch.Generator().manual_seed(seed)
    target_tokens = torch.randint(0, 3, (batch, count + 1), generator=g)
    draft_tokens = torch.full((batch, count + 4), -1, dtype=torch.int32)[:, 2:-2]  # a part of a wider table
    draft_tokens.copy_(target_tokens[:, :-1])
    some = torch.rand(batch, count, generator=g) < 0.2
    draft_tokens[some] = -1  # what a suffix drafter leaves where it has no draft token
    usable = torch.rand(batch, count + 1, generator=g) < 0.9
    expected = []
    for b in range(batch):
        num_accepted = 0
        while (
            num_accepted < count
            and draft_tokens[b, num_accepted] == target_tokens[b, num_accepted]
            and usable[b, num_accepted + 1]
        ):
            num_accepted += 1
        expected.append(num_accepted)
    assert accept.count_accepted.plain(draft_tokens, target_tokens, usable).tolist() == expected
    assert count_accepted(draft_tokens.to(device), target_tokens.to(device), usable.to(device)).tolist() == expected


@on
@given_batches
@quick
@pytest.mark.parametrize("verified", [False, True])
def test_advance_rows(device, verified, seed, batch, count):
    from paceline.kernels.accept_triton import advance_rows

    g = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 9, (batch, 7), generator=g, dtype=torch.int32)
    table[:, 2] = torch.randint(0, 2, (batch,), generator=g)  # slot 0 pads
    sampled = torch.randint(0, 2**31 - 1, (batch, count), generator=g)
    logprobs = -torch.rand(batch, count, generator=g)
    num_accepted = torch.randint(0, count, (batch, 3), generator=g)[:, 1] if verified else None

    def run(work, where):
        rows = table.to(where, copy=True)
        columns = (rows[:, i] for i in (0, 1, 2, 5))
        packed = work(*columns, *(None if t is None else t.to(where) for t in (sampled, logprobs, num_accepted)))
        return packed.cpu(), rows.cpu()

    packed, rows = run(advance_rows, device)
    for a, b in zip((packed, rows), run(accept.advance_rows.plain, "cpu"), strict=True):
        assert torch.equal(a, b)
    for b in range(batch):
        last = 0 if num_accepted is None else int(num_accepted[b])
        moved = last + 1 if table[b, 2] else 0
        assert rows[b, [0, 1, 5]].tolist() == [sampled[b, last], table[b, 1] + moved, max(0, table[b, 5] - moved)]
        assert packed[b, :count].tolist() == sampled[b].tolist() and packed[b, -1] == last
        assert torch.equal(packed[b, count:-1].view(torch.float32), logprobs[b])
    assert torch.equal(rows[:, [2, 3, 4, 6]], table[:, [2, 3, 4, 6]])
