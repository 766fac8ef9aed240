"""Tokens that were written ahead, by whatever policy, change nothing: the completions are those of plain decoding, with
the log-probabilities of the policy of now. In float64, where rounding cannot flip a race."""

from __future__ import annotations

import copy
import random
from itertools import cycle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core import Completion
from paceline.rollout import EngineSettings, RolloutEngine

from .drafters import STRATEGIES, random_neural
from .test_engine import assert_same, make_requests
from .test_exactness import MODELS, SAMPLINGS, engine_with_all, plainly

Ahead = dict[int, list[int]]


def neighbour(model, size: float):
    """The policy before an update of this size."""
    torch.manual_seed(1)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += size * torch.randn_like(parameter)
    return other


def spoilt(plain: dict[int, Completion], dice: random.Random, vocab: int = 128) -> Ahead:
    """Beginnings of the completions: whole, short, with a wrong token somewhere, or none; and tokens beyond the end."""
    ahead = {}
    for i, completion in plain.items():
        tokens = completion.tokens[: dice.choice([0, 1, dice.randint(0, 60), 10**6])]
        if tokens and dice.random() < 0.5:
            at = dice.randrange(len(tokens))
            tokens[at] = (tokens[at] + dice.randrange(1, vocab)) % vocab
        ahead[i] = tokens + [dice.randrange(vocab) for _ in range(dice.choice([0, 0, 1, 70]))]
    return ahead


def finished(engine: RolloutEngine, pause: int | None = None) -> dict[int, Completion]:
    """With all that runs sent back to the queue after so many rounds, once."""
    done = {}
    while engine.unfinished:
        for completion in engine.step():
            assert completion.request.id not in done, "a request was completed twice"
            done[completion.request.id] = completion
        if pause is not None and engine.stats.decode_steps >= pause:
            engine.pause()
            pause = None
    assert engine.pool.free == engine.pool.usable, "pages leaked"
    return done


@pytest.mark.parametrize(("family", "sampling"), zip(cycle(MODELS), SAMPLINGS))
def test_written_by_the_policy_before_an_update(family, sampling):
    model = MODELS[family]
    requests = make_requests(24, seed=4, groups=6, shortest=20, **SAMPLINGS[sampling])
    ahead = {i: c.tokens for i, c in plainly(neighbour(model, 1e-3), requests).items()}
    plain = plainly(model, requests)
    engine = engine_with_all(model, plain, max_batch=16, page_size=16)
    dice = random.Random(2)
    engine.choose = lambda n: dice.choice(STRATEGIES)
    engine.submit(requests, ahead)
    assert_same(finished(engine), plain)
    stats = engine.stats
    # The last token that a completion can have is never taken from what was written ahead.
    assert stats.ahead_tokens <= sum(map(len, ahead.values()))
    assert 0 < stats.ahead_accepted < stats.ahead_tokens and 0 < stats.ahead_flips < len(requests)


def test_written_by_the_same_policy_it_is_all_accepted():
    model = MODELS["qwen3"]
    requests = make_requests(24, seed=1, groups=6)
    plain = plainly(model, requests)
    engine = RolloutEngine(model, EngineSettings(max_batch=64))
    engine.submit(requests, {i: c.tokens for i, c in plain.items()})
    assert_same(finished(engine), plain)
    stats = engine.stats
    assert stats.ahead_accepted == stats.ahead_tokens and not stats.ahead_flips and not stats.decode_steps


histories = st.fixed_dictionaries(
    {
        "family": st.sampled_from(list(MODELS)),
        "sampling": st.sampled_from(list(SAMPLINGS)),
        "batch": st.sampled_from([1, 2, 5, 32]),
        "page_size": st.sampled_from([8, 16, 64]),
        "pages": st.sampled_from([None, 40, 80]),
        "prefill_tokens": st.sampled_from([16, 100, 8192]),
        "seed": st.integers(0, 10**6),
        "count": st.integers(1, 12),
        "pause": st.integers(0, 30),
        "released": st.integers(0, 3),
    }
)


@given(histories, st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_any_history(h, strategies):
    """Right, wrong, too long and missing ones among groups that share prompts, in any batch, with too few pages, with
    requests released and submitted again, and a pause in mid-flight."""
    model = MODELS[h["family"]]
    dice = random.Random(h["seed"])
    groups = max(1, h["count"] // 2)
    requests = make_requests(h["count"], seed=h["seed"], groups=groups, shortest=20, **SAMPLINGS[h["sampling"]])
    plain = plainly(model, requests)
    ahead = spoilt(plain, dice)
    engine = engine_with_all(
        model, plain, h["seed"], max_batch=h["batch"], page_size=h["page_size"], pages=h["pages"],
        prefill_tokens=h["prefill_tokens"], max_length=160,
    )  # fmt: skip
    turn = iter(range(10**9))
    engine.choose = lambda n: strategies[next(turn) % len(strategies)]
    engine.submit(requests, ahead)
    by_id = {r.id: r for r in requests}
    done = {c.request.id: c for c in engine.step()}
    engine.submit([by_id[i] for i in engine.release(h["released"])], ahead)
    assert_same(done | finished(engine, h["pause"]), plain)


def test_stop_strings_end_what_was_written_ahead():
    def decode(tokens):
        return "".join(chr(97 + t % 26) for t in tokens)

    model = MODELS["llama"]
    requests = make_requests(48, seed=5, groups=12, stops=(), stop=("ab", "qzx", "e"))
    plain = plainly(model, requests, decode)
    without = [r.__class__(r.id, r.prompt, r.sampling.__class__(max_tokens=60), r.seed) for r in requests]
    longer = {i: c.tokens for i, c in plainly(model, without).items()}  # goes on behind the stop string
    engine = RolloutEngine(model, EngineSettings(max_batch=16), decode)
    engine.submit(requests, longer)
    assert_same(finished(engine), plain)


def test_a_drafter_is_left_as_after_a_prefill_of_the_same_tokens():
    """Cache and features of the neural drafter, for sequences of which a part of what was written ahead is accepted."""
    model = MODELS["qwen3"]
    requests = make_requests(6, seed=9, shortest=50, stops=())
    plain = plainly(model, requests)
    kept = {r.id: 7 + 5 * i for i, r in enumerate(requests)}
    wrong = {i: [*c.tokens[: kept[i]], (c.tokens[kept[i]] + 1) % 128, 3, 4] for i, c in plain.items()}
    drafters = []
    for ahead in (wrong, {i: c.tokens[: kept[i]] for i, c in plain.items()}):
        neural = random_neural(model)
        engine = RolloutEngine(model, EngineSettings(max_batch=8), None, [neural])
        engine.submit(requests, ahead)
        assert not engine.step()
        assert {s.request.id: s.generated - 1 for s in engine.scheduler.running} == kept
        drafters.append((neural, engine))
    (a, first), (b, second) = drafters
    for x, y in ((a.cache.k, b.cache.k), (a.cache.v, b.cache.v), (a.ring.features, b.ring.features)):
        assert torch.allclose(x, y, atol=1e-12)
    assert torch.equal(a.ring.tokens, b.ring.tokens)
    assert torch.equal(first.rows.host, second.rows.host)
    assert first.pool.free == second.pool.free, "pages of what was not accepted are given back"
