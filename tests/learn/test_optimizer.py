"""AdamW equals torch's, keeps small updates to bfloat16 weights, and comes back from a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.learn.optimizer import AdamW


def twin(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.ParameterDict(
        {"w": nn.Parameter(torch.randn(7, 5, dtype=dtype)), "b": nn.Parameter(torch.randn(5, dtype=dtype))}
    )


def grads(params: nn.ParameterDict, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equals_torch(decay):
    ours, theirs = twin(), twin()
    mine = AdamW(ours.items(), betas=(0.9, 0.95), eps=1e-6, weight_decay=decay)
    groups = [
        {"params": [theirs["w"]], "weight_decay": decay},
        {"params": [theirs["b"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-6)
    for step in range(20):
        rate = 0.01 * (step + 1)
        grads(ours, step)
        grads(theirs, step)
        mine.step(rate)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-12)


def test_master_weights_keep_updates_that_bfloat16_would_lose():
    with_master, without = twin(torch.bfloat16), twin(torch.bfloat16)
    start = without["w"].detach().clone()
    a = AdamW(with_master.items())
    b = AdamW(without.items(), master_weights=False)
    for _ in range(200):
        for params in (with_master, without):
            for p in params.values():
                p.grad = torch.ones_like(p)
        a.step(1e-5)
        b.step(1e-5)
    assert torch.equal(without["w"][start.abs() > 0.1], start[start.abs() > 0.1]), "this is what is lost"
    moved = a.master["w"] - start.float()
    torch.testing.assert_close(moved, torch.full_like(moved, -2e-3), rtol=0.01, atol=1e-6)


def test_state_precision_is_a_choice():
    params = twin(torch.float32)
    optimizer = AdamW(params.items(), state_dtype=torch.bfloat16)
    assert {t.dtype for t in optimizer.mean.values()} == {torch.bfloat16}
    reference = twin(torch.float32)
    exact = AdamW(reference.items())
    for step in range(10):
        for p in (params, reference):
            grads(p, step)
        optimizer.step(0.01)
        exact.step(0.01)
    torch.testing.assert_close(params["w"], reference["w"], rtol=0.02, atol=0.02)
    assert not torch.equal(params["w"], reference["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_goes_on_from_saved_state(dtype):
    one, two = twin(dtype), twin(dtype)
    a, b = AdamW(one.items()), AdamW(two.items())
    for step in range(5):
        grads(one, step)
        a.step(0.01)
    two.load_state_dict(one.state_dict())
    b.load({k: v.clone() for k, v in a.state().items()})
    for step in range(5, 9):
        for params, optimizer in ((one, a), (two, b)):
            grads(params, step)
            optimizer.step(0.01)
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_writes_in_place():
    params = twin()
    where = {k: p.data_ptr() for k, p in params.items()}
    grads(params, 0)
    AdamW(params.items()).step(0.1)
    assert where == {k: p.data_ptr() for k, p in params.items()}
