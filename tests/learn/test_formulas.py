"""Every advantage and loss against an independent float64 formula, written as the papers write it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.learn import advantages as adv
from paceline.learn import losses
from paceline.learn.packing import plan
from paceline.learn.schedule import learning_rate

number = st.floats(-5, 5)
groups = st.integers(2, 6).flatmap(lambda n: st.lists(st.lists(number, min_size=n, max_size=n), min_size=1, max_size=5))
many = settings(max_examples=60, deadline=None)


@given(groups)
@many
def test_grpo(rewards):
    got = adv.grpo(torch.tensor(rewards, dtype=torch.float64))
    for g, row in enumerate(rewards):
        mean = sum(row) / len(row)
        std = math.sqrt(sum((r - mean) ** 2 for r in row) / (len(row) - 1))
        np.testing.assert_allclose(got[g], [(r - mean) / (std + 1e-4) for r in row], atol=1e-8)


@given(groups)
@many
def test_dr_grpo_and_rloo(rewards):
    tensor = torch.tensor(rewards, dtype=torch.float64)
    for g, row in enumerate(rewards):
        n = len(row)
        np.testing.assert_allclose(adv.dr_grpo(tensor)[g], [r - sum(row) / n for r in row], atol=1e-12)
        others = [sum(x for j, x in enumerate(row) if j != i) / (n - 1) for i in range(n)]
        np.testing.assert_allclose(adv.rloo(tensor)[g], [r - o for r, o in zip(row, others, strict=True)], atol=1e-12)


@given(
    st.lists(st.tuples(number, st.lists(number, min_size=1, max_size=6)), min_size=2, max_size=6),
    st.floats(0, 1),
)
@many
def test_reinforce_pp(answers, coef):
    """R_t = r_T - coef * (kl_t + ... + kl_T), then whitened over all tokens."""
    returns = []
    for reward, kl in answers:
        for t in range(len(kl)):
            value = 0.0
            for s in range(len(kl) - 1, t - 1, -1):
                value += (reward if s == len(kl) - 1 else 0.0) - coef * kl[s]
            returns.append(value)
    array = np.array(returns)
    expected = (array - array.mean()) / np.sqrt(array.var(ddof=1) + 1e-8)
    got = adv.reinforce_pp(
        torch.tensor([r for r, _ in answers], dtype=torch.float64),
        torch.tensor([len(kl) for _, kl in answers]),
        torch.tensor([x for _, kl in answers for x in kl], dtype=torch.float64),
        coef,
    )
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_overlong_penalty():
    """DAPO, equation 13: L_max = 100, L_cache = 20."""
    lengths = torch.tensor([10, 80, 81, 90, 99, 100])
    expected = [0.0, 0.0, -1 / 20, -10 / 20, -19 / 20, -1.0]
    np.testing.assert_allclose(adv.overlong_penalty(lengths, 100, 20), expected)
    np.testing.assert_allclose(adv.overlong_penalty(lengths, 100, 0), 0.0)


def test_mixed_groups():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    assert adv.mixed(rewards).tolist() == [False, True, False]


# No advantage so small that times a ratio it rounds to zero: its gradient would be zero though nothing was clipped.
advantage = st.floats(-2, 2).map(lambda a: a if abs(a) > 1e-9 else 0.0)
tokens = st.lists(st.tuples(st.floats(-4, 0), st.floats(-4, 0), advantage), min_size=1, max_size=8)


@given(tokens, st.floats(0.05, 0.4), st.floats(0.05, 0.4))
@many
def test_policy_loss_and_what_is_clipped(rows, low, high):
    logp, old, a = (torch.tensor(x, dtype=torch.float64) for x in zip(*rows, strict=True))
    logp.requires_grad_(True)
    got = losses.policy_loss(logp, old, a, low, high)
    for i, (p, o, advantage) in enumerate(rows):
        ratio = math.exp(p - o)
        kept = min(max(ratio, 1 - low), 1 + high)
        assert got[i].item() == pytest.approx(-min(ratio * advantage, kept * advantage), abs=1e-12)
    (gradient,) = torch.autograd.grad(got.sum(), logp)
    flat = losses.clipped(logp, old, a, low, high)
    assert ((gradient == 0) == (flat | (a == 0))).all()


@given(tokens)
@many
def test_kl_and_importance_weights(rows):
    logp, other, _ = (torch.tensor(x, dtype=torch.float64) for x in zip(*rows, strict=True))
    for i, (p, q, _) in enumerate(rows):
        assert losses.kl_k3(logp, other)[i].item() == pytest.approx(math.exp(q - p) - (q - p) - 1, abs=1e-12)
        assert losses.importance_weights(logp, other, 2.0)[i].item() == pytest.approx(min(math.exp(p - q), 2.0))
    assert (losses.kl_k3(logp, other) >= -1e-12).all()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 10**6))
@many
def test_aggregation(lengths, seed):
    """The four ways of making one number of token losses, as sums over answers and tokens."""
    r = np.random.default_rng(seed)
    rows = [r.normal(size=n) for n in lengths]
    flat, count = np.concatenate(rows), torch.tensor(lengths)
    n, longest = len(lengths), 20
    expected = {
        "sequence_mean": np.mean([row.mean() for row in rows]),
        "token_mean": flat.mean(),
        "constant": sum(row.sum() for row in rows) / (n * longest),
        "sequence_sum": np.mean([row.sum() for row in rows]),
    }
    for how, value in expected.items():
        assert (losses.token_weights(count, how, longest).numpy() * flat).sum() == pytest.approx(value, abs=1e-12)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(100, 2000))
@many
def test_plan_packs_everything_once_and_within_bounds(lengths, limit):
    bins = plan(lengths, limit)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in b) for b in bins]
    assert all(size <= limit or len(b) == 1 for size, b in zip(sizes, bins, strict=True))
    # First fit never leaves two bins that would go into one.
    assert sum(size <= limit / 2 for size in sizes) <= 1


def test_learning_rate():
    warm = [learning_rate(i, 100, 1.0, 4, "constant", 0.0) for i in range(6)]
    np.testing.assert_allclose(warm, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert learning_rate(99, 100, 2.0, 4, "linear", 0.1) == pytest.approx(0.2)
    assert learning_rate(99, 100, 2.0, 0, "cosine", 0.0) == pytest.approx(0.0)
    assert learning_rate(50, 101, 2.0, 0, "cosine", 0.0) == pytest.approx(1.0)
