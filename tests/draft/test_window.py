"""The drafter's cache: reading rings in place is the same as copying them side by side, round after round."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.draft.eagle.cache import WindowCache
from paceline.draft.eagle.paged_cache import PagedWindowCache
from paceline.model.config import DecoderConfig

from ..conftest import tiny_config

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tree", [False, True])
def test_rounds_in_place_equal_rounds_on_copies(device, tree):
    config = DecoderConfig.from_hf(tiny_config())
    heads, kv, d = config.heads, config.kv_heads, config.head_dim
    window, capacity, step, width, levels = 12, 22, 4, 3, 4
    there = torch.device(device)
    copied = WindowCache(config, 6, window, capacity, torch.float32, there)
    paged = PagedWindowCache(config, 6, window, capacity, torch.float32, there)
    torch.manual_seed(0)
    dice = random.Random(1)

    def both(call, n):
        q, k, v = (torch.randn(len(slot) * n, h, d, device=there) for h in (heads, kv, kv))
        got, expected = (one(0, q, k, v) for one in call)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        return k, v

    slot = torch.tensor([3, 1, 6], dtype=torch.int32, device=there)
    drafted = torch.tensor([0, 5, 40], dtype=torch.int32, device=there)
    start = torch.tensor([0, 2, 33], dtype=torch.int32, device=there)
    for s, n in zip(slot.split(1), drafted.tolist(), strict=True):
        tail = torch.randn(2, min(n, window), kv, d, device=there)
        for cache in (copied, paged):
            cache.fill(s, (tail[0], tail[1]), n)
    for _ in range(12):
        new = torch.tensor([dice.randint(1, step) for _ in range(3)], device=there)
        present = torch.arange(step, device=there) < new[:, None]
        rounds = [cache.round(slot, drafted, start, step + width * levels) for cache in (copied, paged)]
        for one in rounds:
            one.entries(step, present)
        q, k, v = (torch.randn(3 * step, h, d, device=there) for h in (heads, kv, kv))
        got, expected = (one(0, q, k, v).view(3, step, -1)[present] for one in rounds)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        places = drafted[:, None].long() + torch.arange(step, device=there)
        for cache in (copied, paged):
            where = slot.long()[:, None].where(present, 0)
            cache.put(where, places, k.view(3, step, kv, d), v.view(3, step, kv, d))
        ancestry = torch.zeros(3, width, 0, dtype=torch.bool, device=there)
        for _ in range(levels):
            if not tree:
                for one in rounds:
                    one.draft_token()
                both(rounds, 1)
                continue
            parent = torch.tensor([[dice.randrange(width) for _ in range(width)] for _ in range(3)], device=there)
            above = ancestry.gather(1, parent[..., None].expand_as(ancestry))
            itself = torch.eye(width, dtype=torch.bool, device=there).expand(3, -1, -1)
            ancestry = torch.cat((above, itself), 2)
            for one in rounds:
                one.draft_level(ancestry)
            both(rounds, width)
        drafted = (drafted + new).int()


@pytest.mark.parametrize("kind", [WindowCache, PagedWindowCache])
def test_answers_to_one_prompt_each_get_what_it_left(kind):
    config = DecoderConfig.from_hf(tiny_config())
    tail = tuple(torch.randn(2, 12, config.kv_heads, config.head_dim))
    at_once, in_turn = (kind(config, 6, 12, 22, torch.float32, torch.device("cpu")) for _ in range(2))
    at_once.fill(torch.tensor([3, 1, 6]), tail, 40)
    for slot in (3, 1, 6):
        in_turn.fill(torch.tensor([slot]), tail, 40)
    assert torch.equal(at_once.k, in_turn.k) and torch.equal(at_once.v, in_turn.v)
    # 12 places of 3 rings, and no other: k and v are not all alike, so none of them is zero by chance
    assert (at_once.k != 0).sum() == 3 * tail[0].numel() and (at_once.v != 0).sum() == 3 * tail[1].numel()
