"""The race kernel draws what adding written-out noise to the logits draws, with the same log-probability."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.kernels.gumbel_argmax import Bans
from paceline.kernels.gumbel_argmax import gumbel_argmax as either
from paceline.kernels.noise import noise_ahead

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
quick = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "batch": st.integers(1, 4),
        "each": st.sampled_from([1, 1, 2, 5]),
        "vocab": st.sampled_from([5, 100, 1024, 1025, 3000, 9000]),
        "scale": st.sampled_from([0.1, 3.0]),
        "some": st.booleans(),
        "noise": st.booleans(),
    }
)


def case(seed, batch, each, vocab, scale, some, noise):
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(batch * each, vocab + 7, generator=g) * scale
    logits = wide[:, :vocab]  # rows that lie further apart than they are long
    keys = torch.randint(-(2**63), 2**63 - 1, (batch, 2), generator=g)[:, 1]
    places = torch.randint(0, 5000, (batch, 3), generator=g, dtype=torch.int32)[:, 2]
    temperature = torch.tensor([0.0, 1.0, 0.6, 1.7])[torch.randint(0, 4, (batch,), generator=g)]
    level = torch.randint(0, 6, (batch, each), generator=g) if each > 1 else None
    ids = torch.randperm(4 * vocab, generator=g)[:vocab] if some else None
    return logits, keys, places, temperature, level, ids, noise


def there(args, device):
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]


@pytest.mark.parametrize("device", DEVICES)
@given(shape=shapes)
@quick
def test_kernel_equals_the_twin(device, shape):
    from paceline.kernels.gumbel_argmax_triton import gumbel_argmax

    args = case(**shape)
    ahead = shape["seed"] % 3
    expected, logprob = either.plain(*args, ahead=ahead)
    got, got_logprob = gumbel_argmax(*there(args, device), ahead=ahead)
    assert got.cpu().tolist() == expected.tolist()
    torch.testing.assert_close(got_logprob.cpu(), logprob, rtol=1e-5, atol=1e-5)
    silent, zeros = gumbel_argmax(*there(args, device), logprobs=False, ahead=ahead)
    assert silent.tolist() == got.tolist() and not zeros.any()


@pytest.mark.parametrize("device", DEVICES)
@given(shape=shapes)
@quick
def test_banned_tokens_do_not_win(device, shape):
    """The likeliest ones, for as long as they are banned; the log-probability is as if nothing were."""
    from paceline.kernels.gumbel_argmax_triton import gumbel_argmax

    logits, keys, places, temperature, level, _, noise = case(**shape)
    g = torch.Generator().manual_seed(shape["seed"])
    batch, each = shape["batch"], shape["each"]
    free = either.plain(logits, keys, places, temperature, level, noise=noise)[0].view(batch, each)
    wide = torch.full((batch, 5), -1, dtype=torch.int32)
    wide[:, 1:4] = free[:, :1].int()
    wide[:, 2] = free[:, -1].int()
    left = torch.randint(0, 7, (batch, 2), generator=g, dtype=torch.int32)[:, 1]
    wide[left == 0] = -1  # as the engine has them where nothing is banned
    bans = Bans(wide[:, 1:4], left)
    args = logits, keys, places, temperature, level
    expected, logprob = either.plain(*args, noise=noise, bans=bans)
    got, got_logprob = gumbel_argmax(*there(args, device), noise=noise, bans=Bans(*there(bans, device)))
    assert got.cpu().tolist() == expected.tolist()
    torch.testing.assert_close(got_logprob.cpu(), logprob, rtol=1e-5, atol=1e-5)
    early = left[:, None] > (0 if level is None else level)
    drawn = got.cpu().view(batch, each)
    assert not ((drawn[..., None] == bans.tokens[:, None]).any(-1) & early).any()
    assert torch.equal(drawn[~early], free[~early])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 40])
def test_the_winner_is_that_of_written_noise(device, rows):
    """Bit for bit: logits so flat that a noise or a sum that were off by a rounding would soon change a winner."""
    from paceline.kernels.fused_triton import noise_ahead as written
    from paceline.kernels.gumbel_argmax_triton import gumbel_argmax

    g = torch.Generator().manual_seed(3)
    vocab = 2000 if rows > 1 else 50000
    if device == "cuda":
        rows, vocab = 30 * rows, 50000
    logits = torch.randn(rows, vocab, generator=g).mul(0.05).to(device)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g).to(device)
    places = torch.randint(0, 5000, (rows,), generator=g).to(device)
    temperature = torch.rand(rows, generator=g).to(device) + 0.3
    noise = written(keys, places, 1, vocab)[:, 0]
    expected = (logits / temperature[:, None] + noise).argmax(-1)
    assert gumbel_argmax(logits, keys, places, temperature)[0].tolist() == expected.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_ties_go_to_the_first(device):
    from paceline.kernels.gumbel_argmax_triton import gumbel_argmax

    logits = torch.zeros(3, 5000, device=device)
    logits[1, [700, 4000, 2500]] = 2.0
    logits[2, [4999, 4000]] = 2.0
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    tokens, logprob = gumbel_argmax(logits, zeros, zeros, zeros.float())
    assert tokens.tolist() == [0, 700, 4000]
    torch.testing.assert_close(logprob, logits.log_softmax(-1).amax(-1), rtol=1e-6, atol=1e-6)


def test_twin_uses_the_noise_of_the_engine():
    logits, keys, places = torch.randn(6, 40, dtype=torch.float64), torch.arange(3), torch.tensor([4, 9, 1])
    level = torch.tensor([[0, 2]]).expand(3, -1)
    noise = noise_ahead(keys, places, 3, 40, torch.float64)[:, [0, 2]].flatten(0, 1)
    tokens, _ = either.plain(logits, keys, places, torch.ones(3), level)
    assert tokens.tolist() == (logits + noise).argmax(-1).tolist()
