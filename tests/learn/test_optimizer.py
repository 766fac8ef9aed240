"""AdamW equals torch's, keeps small updates to bfloat16 weights, and comes back from a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.kernels import adam as module
from paceline.kernels.adam import stochastic_round
from paceline.kernels.noise import stream
from paceline.learn.optimizer import AdamW


def copied(dtype=torch.float64):
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
    ours, theirs = copied(), copied()
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
    with_master, without = copied(torch.bfloat16), copied(torch.bfloat16)
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
    params = copied(torch.float32)
    optimizer = AdamW(params.items(), state_dtype=torch.bfloat16)
    assert {t.dtype for t in optimizer.mean.values()} == {torch.bfloat16}
    reference = copied(torch.float32)
    exact = AdamW(reference.items())
    for step in range(10):
        for p in (params, reference):
            grads(p, step)
        optimizer.step(0.01)
        exact.step(0.01)
    torch.testing.assert_close(params["w"], reference["w"], rtol=0.02, atol=0.02)
    assert not torch.equal(params["w"], reference["w"])


def test_rounding_by_chance_is_right_on_average():
    value = torch.tensor([1.0 + 2**-10, -3.0 - 2**-9, 2.0, 0.0, 1e-30]).repeat(20000, 1)
    chance = stream(17, 0, value.numel(), value.device).view_as(value)
    rounded = stochastic_round(value, chance >> 16)
    assert torch.equal(rounded, rounded.bfloat16().float()), "bfloat16 can hold them"
    assert torch.equal(rounded[:, 2:4], value[:, 2:4]), "what it can hold stays"
    spread = 2**-7 / 20000**0.5
    torch.testing.assert_close(rounded.mean(0)[:2], value[0, :2], rtol=0, atol=5 * 2 * spread)


def test_bfloat16_moments_follow_gradients_that_become_smaller():
    """At 0.999 a step changes the second moment by less than bfloat16 shows; to the nearest, it would stand still."""
    optimizers = {}
    for dtype in (torch.float32, torch.bfloat16):
        params = {"w": nn.Parameter(torch.zeros(64, 64))}
        optimizers[dtype] = optimizer = AdamW(params.items(), state_dtype=dtype)
        for step in range(1500):
            params["w"].grad = torch.full((64, 64), 1.0 if step < 50 else 0.01)
            optimizer.step(1e-4)
    exact, ours = (o.square["w"].float() for o in optimizers.values())
    nearest = torch.tensor(1.0)
    for _ in range(100):
        nearest = (nearest * 0.999).bfloat16().float()
    assert nearest == 1.0, "this is what rounding to the nearest does"
    assert exact.mean() < 0.02 and ours.mean() == pytest.approx(float(exact.mean()), rel=0.02)
    moved = [o.parameters["w"].detach().mean() for o in optimizers.values()]
    assert moved[1] == pytest.approx(float(moved[0]), rel=0.01)


def test_bfloat16_moments_learn_as_well():
    """A small network on noisy batches: the loss ends where it does with moments in float32."""
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        teacher, student = (nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)) for _ in range(2))
        optimizer = AdamW(student.named_parameters(), state_dtype=dtype)
        last = []
        for step in range(600):
            x = torch.randn(64, 16)
            loss = (student(x) - teacher(x)).square().mean()
            loss.backward()
            optimizer.step(3e-3 * (1 - step / 600))
            optimizer.zero_grad()
            last.append(float(loss.detach()))
        ends[dtype] = sum(last[-50:]) / 50
        assert ends[dtype] < 0.1 * last[0]
    assert ends[torch.bfloat16] < 1.1 * ends[torch.float32]


def test_a_step_in_pieces_is_the_same_step(monkeypatch):
    whole, cut = copied(torch.bfloat16), copied(torch.bfloat16)
    a, b = (AdamW(params.items(), state_dtype=torch.bfloat16) for params in (whole, cut))
    for step in range(3):
        grads(whole, step)
        grads(cut, step)
        a.step(0.01)
        with monkeypatch.context() as patch:
            patch.setattr(module, "ADAM_CHUNK", 4)
            b.step(0.01)
    assert all(torch.equal(whole[k], cut[k]) for k in whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_goes_on_from_saved_state(dtype):
    one, two = copied(dtype), copied(dtype)
    a, b = (AdamW(params.items(), state_dtype=dtype) for params in (one, two))
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
    params = copied()
    where = {k: p.data_ptr() for k, p in params.items()}
    grads(params, 0)
    AdamW(params.items()).step(0.1)
    assert where == {k: p.data_ptr() for k, p in params.items()}
