"""The kernel samples what adding stored noise to the logits samples, with the same log-probability."""

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
        "nodes": st.sampled_from([1, 1, 2, 5]),
        "vocab": st.sampled_from([5, 100, 1024, 1025, 3000, 9000]),
        "scale": st.sampled_from([0.1, 3.0]),
        "some": st.booleans(),
        "noise": st.booleans(),
    }
)


def case(seed, batch, nodes, vocab, scale, some, noise):
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(batch * nodes, vocab + 7, generator=g) * scale
    logits = wide[:, :vocab]  # a stride larger than the row
    keys = torch.randint(-(2**63), 2**63 - 1, (batch, 2), generator=g)[:, 1]
    positions = torch.randint(0, 5000, (batch, 3), generator=g, dtype=torch.int32)[:, 2]
    temperature = torch.tensor([0.0, 1.0, 0.6, 1.7])[torch.randint(0, 4, (batch,), generator=g)]
    depth = torch.randint(0, 6, (batch, nodes), generator=g) if nodes > 1 else None
    ids = torch.randperm(4 * vocab, generator=g)[:vocab] if some else None
    return logits, keys, positions, temperature, depth, ids, noise


def there(args, device):
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]


@pytest.mark.parametrize("device", DEVICES)
@given(shape=shapes)
@quick
def test_kernel_equals_the_reference(device, shape):
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
def test_banned_tokens_are_not_sampled(device, shape):
    """The likeliest ones, for as long as they are banned; the log-probability is as if nothing were."""
    from paceline.kernels.gumbel_argmax_triton import gumbel_argmax

    logits, keys, positions, temperature, depth, _, noise = case(**shape)
    g = torch.Generator().manual_seed(shape["seed"])
    batch, nodes = shape["batch"], shape["nodes"]
    free = either.plain(logits, keys, positions, temperature, depth, noise=noise)[0].view(batch, nodes)
    wide = torch.full((batch, 5), -1, dtype=torch.int32)
    wide[:, 1:4] = free[:, :1].int()
    wide[:, 2] = free[:, -1].int()
    remaining = torch.randint(0, 7, (batch, 2), generator=g, dtype=torch.int32)[:, 1]
    wide[remaining == 0] = -1  # as the engine has them where nothing is banned
    bans = Bans(wide[:, 1:4], remaining)
    args = logits, keys, positions, temperature, depth
    expected, logprob = either.plain(*args, noise=noise, bans=bans)
    got, got_logprob = gumbel_argmax(*there(args, device), noise=noise, bans=Bans(*there(bans, device)))
    assert got.cpu().tolist() == expected.tolist()
    torch.testing.assert_close(got_logprob.cpu(), logprob, rtol=1e-5, atol=1e-5)
    early = remaining[:, None] > (0 if depth is None else depth)
    sampled = got.cpu().view(batch, nodes)
    assert not ((sampled[..., None] == bans.tokens[:, None]).any(-1) & early).any()
    assert torch.equal(sampled[~early], free[~early])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 40])
def test_the_token_is_that_of_stored_noise(device, rows):
    """Bit for bit: logits so flat that noise or a sum that is off by one rounding would soon change a token."""
    from paceline.kernels.fused_triton import noise_ahead as stored
    from paceline.kernels.gumbel_argmax_triton import gumbel_argmax

    g = torch.Generator().manual_seed(3)
    vocab = 2000 if rows > 1 else 50000
    if device == "cuda":
        rows, vocab = 30 * rows, 50000
    logits = torch.randn(rows, vocab, generator=g).mul(0.05).to(device)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g).to(device)
    positions = torch.randint(0, 5000, (rows,), generator=g).to(device)
    temperature = torch.rand(rows, generator=g).to(device) + 0.3
    noise = stored(keys, positions, 1, vocab)[:, 0]
    expected = (logits / temperature[:, None] + noise).argmax(-1)
    assert gumbel_argmax(logits, keys, positions, temperature)[0].tolist() == expected.tolist()


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


def test_the_reference_uses_the_noise_of_the_engine():
    logits, keys, positions = torch.randn(6, 40, dtype=torch.float64), torch.arange(3), torch.tensor([4, 9, 1])
    depth = torch.tensor([[0, 2]]).expand(3, -1)
    noise = noise_ahead(keys, positions, 3, 40, torch.float64)[:, [0, 2]].flatten(0, 1)
    tokens, _ = either.plain(logits, keys, positions, torch.ones(3), depth)
    assert tokens.tolist() == (logits + noise).argmax(-1).tolist()
