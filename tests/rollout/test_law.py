"""Sampling follows the law: the race draws from the exact softmax, and its noise is independent everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.kernels import fused_triton, gumbel_argmax_triton
from paceline.kernels.gumbel_argmax import gumbel_argmax as race_kernel
from paceline.kernels.noise import GOLDEN, MASK, MIX1, MIX2, gumbel, position_keys, request_key, signed
from paceline.rollout.filters import Filters
from paceline.rollout.sampling import SamplingRows, filtered_gumbel_argmax

VOCAB, DRAWS = 4096, 40_960


def rows(keys: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, banned=()) -> SamplingRows:
    n = len(keys)
    ban = list(banned) + [banned[0] if banned else -1] * (8 - len(banned))
    return SamplingRows(
        keys,
        torch.full((n,), temperature),
        torch.full((n,), top_k, dtype=torch.int32),
        torch.full((n,), top_p),
        torch.full((n,), min_p),
        torch.full((n,), len(banned), dtype=torch.int32),
        torch.tensor(ban, dtype=torch.int32).expand(n, 8),
    )


def draw(logits: torch.Tensor, draws: int, samplings: list[dict]) -> list[torch.Tensor]:
    """Draws at distinct (request, position) pairs, sixteen positions of many requests, for each kind of sampling."""
    out: list[list[torch.Tensor]] = [[] for _ in samplings]
    for start in range(0, draws, 2048):
        n = min(2048, draws - start)
        keys = torch.tensor([request_key(7, i // 16) for i in range(start, start + n)])
        noise = gumbel(position_keys(keys, torch.arange(start, start + n) % 16), len(logits))
        for tokens, sampling in zip(out, samplings, strict=True):
            filters = Filters.SORTS if set(sampling) - {"temperature"} else Filters.NONE
            tokens.append(filtered_gumbel_argmax(logits.expand(n, -1), rows(keys, **sampling), noise, filters)[0])
    return [torch.cat(tokens) for tokens in out]


def exact(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The distribution by its definition, in float64, token by token."""
    z = logits.double().numpy() / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        total = 0.0
        for rank, token in enumerate(order):
            if total >= top_p and rank:
                p[token] = 0
            total += p[token]
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def chi_square(tokens: torch.Tensor, p: np.ndarray) -> float:
    """p-value of the counts, with tokens too rare for the test pooled."""
    counts = np.bincount(tokens.numpy(), minlength=len(p)).astype(float)
    assert counts[p == 0].sum() == 0, "a token of probability zero was drawn"
    expected = p * len(tokens)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    return stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue


TEMPERATURES = [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.7}]
FILTERS = [
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.02},
    {"temperature": 0.7, "top_k": 200, "top_p": 0.95, "min_p": 0.001},
]
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2.5


@pytest.fixture(scope="module")
def drawn() -> list[torch.Tensor]:
    return draw(LOGITS, DRAWS, TEMPERATURES)


# Filters sort the vocabulary for every draw, which takes long. In a quarter of it each token has four times as many
# draws, and the test finds a smaller error.
@pytest.fixture(scope="module", params=[VOCAB // 4, pytest.param(VOCAB, marks=pytest.mark.soak)])
def filtered(request) -> tuple[torch.Tensor, list[torch.Tensor]]:
    logits = LOGITS[: request.param]
    return logits, draw(logits, DRAWS, FILTERS)


@pytest.mark.parametrize("which", range(len(TEMPERATURES)), ids=lambda i: str(TEMPERATURES[i]))
def test_chi_square_against_the_exact_softmax(drawn, which):
    assert chi_square(drawn[which], exact(LOGITS, **TEMPERATURES[which])) > 1e-4


@pytest.mark.parametrize("which", range(len(FILTERS)), ids=lambda i: str(FILTERS[i]))
def test_chi_square_with_filters(filtered, which):
    logits, tokens = filtered
    assert chi_square(tokens[which], exact(logits, **FILTERS[which])) > 1e-4


def test_the_test_can_fail(drawn):
    """A law that is off by a temperature of 5 % is found out by the same test."""
    assert chi_square(drawn[0], exact(LOGITS, temperature=1.05)) < 1e-4


def test_the_test_can_fail_with_filters(filtered):
    logits, tokens = filtered
    assert chi_square(tokens[0], exact(logits, temperature=1.05, top_k=50)) < 1e-4


def test_flat_law_reaches_every_token():
    (tokens,) = draw(torch.zeros(VOCAB), DRAWS, [{}])
    assert chi_square(tokens, np.full(VOCAB, 1 / VOCAB)) > 1e-4


def test_impossible_and_banned_tokens_are_never_drawn():
    logits = torch.randn(64)
    logits[10:40] = -torch.inf
    (tokens,) = draw(logits, 20_000, [{"banned": (3, 50)}])
    assert not set(tokens.tolist()) & ({3, 50} | set(range(10, 40)))


def test_greedy_is_argmax_and_ignores_the_noise():
    torch.manual_seed(0)
    logits = torch.randn(300, 64)
    keys = torch.arange(300)
    noise = gumbel(position_keys(keys, keys), 64)
    tokens, logprobs = filtered_gumbel_argmax(logits, rows(keys, temperature=0.0), noise, Filters.NONE)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).max(-1).values)


def test_neutral_filters_change_nothing():
    torch.manual_seed(0)
    logits = torch.randn(500, 256) * 3
    keys = torch.arange(500)
    noise = gumbel(position_keys(keys, keys), 256)
    with_filters = filtered_gumbel_argmax(logits, rows(keys), noise, Filters.SORTS)
    without = filtered_gumbel_argmax(logits, rows(keys), noise, Filters.NONE)
    assert torch.equal(with_filters[0], without[0]) and torch.equal(with_filters[1], without[1])


def test_noise_is_independent_across_requests_and_positions():
    """Tokens of neighbouring positions, requests and seeds know nothing of each other."""
    n, vocab = 40_000, 8
    ids = torch.tensor([request_key(0, i) for i in range(n)])
    other_seed = torch.tensor([request_key(1, i) for i in range(n)])
    at = lambda keys, position: gumbel(position_keys(keys, torch.full((n,), position)), vocab).argmax(-1)  # noqa: E731
    base = at(ids, 5)
    for other in (at(ids, 6), at(ids.roll(1), 5), at(ids.roll(1), 6), at(other_seed, 5), at(ids, 5 + 2**20)):
        table = np.zeros((vocab, vocab))
        np.add.at(table, (base.numpy(), other.numpy()), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-4


def test_noise_is_gumbel_and_uncorrelated_across_the_vocabulary():
    keys = position_keys(torch.tensor([request_key(0, i) for i in range(400)]), torch.arange(400))
    noise = gumbel(keys, 512, torch.float64)
    assert stats.kstest(noise.view(-1).numpy(), stats.gumbel_r.cdf).pvalue > 1e-4
    flat = noise - noise.mean()
    for shift in (1, 2, 64):
        r = (flat[:, shift:] * flat[:, :-shift]).mean() / flat.var()
        assert abs(r) < 5 / math.sqrt(400 * 512)


def test_noise_matches_a_plain_integer_implementation():
    """SplitMix64 as published, in Python integers."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, request, position, vocab in [
        (0, 0, 0, 5),
        (123, 2**40 + 7, 1023, 9),
        (2**63 - 1, 2**63 - 1, 99_999, 3),
    ]:
        key = mix((mix((seed + golden) & mask) + (request + 1) * golden) & mask)
        key = mix((key + (position + 1) * golden) & mask)
        bits = [mix((key + (v + 1) * golden) & mask) >> 32 for v in range(vocab)]
        expected = [-math.log(-math.log1p(-min((b + 0.5) / 2**32, 1 - 2**-24))) for b in bits]
        keys = position_keys(torch.tensor([request_key(seed, request)]), torch.tensor([position]))
        np.testing.assert_allclose(gumbel(keys, vocab, torch.float64)[0].numpy(), expected, rtol=1e-12)


def unmix(x: int) -> int:
    """What SplitMix64's finaliser made this of: it is a bijection."""

    def unshift(y: int, bits: int) -> int:
        """x with x ^ (x >> bits) == y."""
        x = y
        for _ in range(64 // bits):
            x = y ^ (x >> bits)
        return x

    x = unshift(x, 31) * pow(MIX2, -1, 2**64) & MASK
    x = unshift(x, 27) * pow(MIX1, -1, 2**64) & MASK
    return unshift(x, 30)


def key_for(bits: int, token: int, position: int) -> int:
    """The key of a request whose 32 random bits for this token at this position are these."""
    place = (unmix(bits << 32) - (token + 1) * GOLDEN) & MASK
    return signed((unmix(place) - (position + 1) * GOLDEN) & MASK)


ENDS = {0: 22.8739, 2**32 - 1: -2.8115}  # the extremes that 32 bits can give, and their noise in float32
TOKEN, POSITION = 37, 911
FORMS = {"torch": "cpu", "triton": "cuda" if torch.cuda.is_available() else "cpu"}  # and where each of them runs


@pytest.mark.parametrize("bits", ENDS)
@pytest.mark.parametrize("form", FORMS)
def test_noise_stays_finite_at_both_ends(form, bits):
    """u = 2**-33 and u next to 1, met by requests that have been made to meet them."""
    keys = torch.tensor([key_for(bits, TOKEN, POSITION)], device=FORMS[form])
    if form == "torch":
        drawn = gumbel(position_keys(keys, torch.tensor([POSITION])), 64)[0]
        wide = gumbel(position_keys(keys, torch.tensor([POSITION])), 64, torch.float64)[0]
        u = min((bits + 0.5) / 2**32, 1 - 2**-24)
        assert wide[TOKEN].item() == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-12)
    else:
        drawn = fused_triton.noise_ahead(keys, torch.tensor([POSITION - 2], device=keys.device), 3, 64)[0, 2]
    assert drawn.isfinite().all()
    assert drawn[TOKEN].item() == pytest.approx(ENDS[bits], abs=1e-3)
    assert drawn.argmax() == TOKEN if bits == 0 else drawn.argmin() == TOKEN, "nothing lies beyond the ends"


@pytest.mark.parametrize("bits", ENDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_race_is_decided_at_both_ends(form, bits):
    """The luckiest token wins among equals; the unluckiest wins where its logit is far above the others."""
    device = FORMS[form]
    keys = torch.tensor([key_for(bits, TOKEN, POSITION)], device=device)
    logits = torch.zeros(1, 64, device=device)
    logits[0, TOKEN] = 0.0 if bits == 0 else 30.0
    run = race_kernel.plain if form == "torch" else gumbel_argmax_triton.gumbel_argmax
    winner, logprob = run(logits, keys, torch.tensor([POSITION], device=device), torch.ones(1, device=device))
    assert winner.tolist() == [TOKEN]
    torch.testing.assert_close(logprob, logits.log_softmax(-1)[:, TOKEN])


@pytest.mark.parametrize("strategy", ["neural:2", "neural:2x3/5~"])
@pytest.mark.parametrize(("vocab", "draws"), [(256, 8192), pytest.param(VOCAB, DRAWS, marks=pytest.mark.soak)])
def test_the_law_holds_with_speculation_on(strategy, vocab, draws):
    """Tokens that were drafted and verified follow the exact distribution of the policy: the second token of
    many answers to one prompt, against the policy's own, summed over every possible first one."""
    from paceline.core import Request, SamplingParams
    from paceline.draft.strategy import Strategy
    from paceline.model.attention import PackedAttention
    from paceline.rollout import EngineSettings, RolloutEngine

    from ..conftest import tiny_model
    from .drafters import random_neural

    model = tiny_model(dtype=torch.float32, vocab_size=vocab, hidden_size=24, num_attention_heads=2, head_dim=12)
    prompt = (5, 17, 90, 3)

    def last_logits(sequences: list[tuple[int, ...]]) -> torch.Tensor:
        attention = PackedAttention([len(t) for t in sequences], torch.device("cpu"))
        tokens = torch.tensor([t for sequence in sequences for t in sequence])
        hidden, _ = model(tokens, attention.positions(), attention)
        return model.logits(hidden[torch.tensor([len(t) for t in sequences]).cumsum(0) - 1]).double()

    first = last_logits([prompt])[0].softmax(-1)
    second = torch.zeros(vocab, dtype=torch.float64)
    for start in range(0, vocab, 256):
        given = last_logits([(*prompt, t) for t in range(start, start + 256)]).softmax(-1)
        second += first[start : start + 256] @ given
    chosen = Strategy.parse(strategy)
    engine = RolloutEngine(model, EngineSettings(max_batch=512), None, [random_neural(model)], [chosen])
    engine.choose = lambda batch: chosen
    requests = (Request(i, prompt, SamplingParams(max_tokens=2), seed=3) for i in range(draws))
    drawn = torch.tensor([c.tokens for c in engine.run(requests)])
    assert engine.stats.drafted_sequences == draws, "every second token was verified against a draft"
    assert chi_square(drawn[:, 0], first.numpy()) > 1e-4
    assert chi_square(drawn[:, 1], second.numpy()) > 1e-4
