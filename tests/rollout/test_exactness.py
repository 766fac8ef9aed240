"""Speculation changes nothing: whatever is drafted, by whomever, in whatever order, the tokens are those of plain
decoding, to the last one, and so are their log-probabilities. In float64, where rounding cannot flip a race."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core import Completion
from paceline.draft.base import PassShape
from paceline.draft.ladder import bucket
from paceline.draft.strategy import Strategy
from paceline.draft.suffix.drafter import SuffixDrafter
from paceline.rollout import EngineSettings, RolloutEngine

from ..conftest import tiny_model
from .drafters import STRATEGIES, Chaos, Scripted, random_neural
from .test_engine import assert_same, make_requests

MODELS = {family: tiny_model(family) for family in ("llama", "qwen2", "qwen3", "mistral")}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "0.6": {"temperature": 0.6},
    "1.0": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 12},
    "top-p": {"temperature": 0.8, "top_p": 0.85},
    "min-p": {"temperature": 1.0, "min_p": 0.05, "min_tokens": 7},
    "all": {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "min_tokens": 20},
}


def engine_with_all(model, plain: dict[int, Completion], seed: int = 0, decode=None, **settings) -> RolloutEngine:
    vocab = model.config.vocab_size
    drafters = [
        SuffixDrafter(settings.get("max_batch", 256), 512, 2**18),
        random_neural(model, seed),
        Scripted("right", plain, vocab, right=True),
        Scripted("wrong", plain, vocab, right=False),
        Chaos(plain, vocab, seed),
    ]
    return RolloutEngine(model, EngineSettings(**settings), decode, drafters, STRATEGIES)


def collect(engine: RolloutEngine, requests) -> dict[int, Completion]:
    done = {}
    for completion in engine.run(requests):
        assert completion.request.id not in done, "a request was completed twice"
        done[completion.request.id] = completion
    assert engine.pool.free == engine.pool.usable, "pages leaked"
    return done


def plainly(model, requests, decode=None) -> dict[int, Completion]:
    return collect(RolloutEngine(model, EngineSettings(max_batch=64), decode), requests)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", MODELS)
def test_toggled_at_random(family, sampling):
    """84 requests each, batches of 1, 7 and 32, a strategy drawn anew for every round."""
    model = MODELS[family]
    requests = make_requests(84, seed=3, groups=21, shortest=20, **SAMPLINGS[sampling])
    plain = plainly(model, requests)
    start = 0
    for batch, count in ((1, 6), (7, 28), (32, 50)):
        part = requests[start : start + count]
        start += count
        engine = engine_with_all(model, plain, max_batch=batch, page_size=16)
        dice = random.Random(batch)
        engine.choose = lambda n, dice=dice: dice.choice(STRATEGIES)
        assert_same(collect(engine, part), {r.id: plain[r.id] for r in part})
        assert engine.stats.drafted_sequences > 0


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_each_strategy_alone(strategy: Strategy):
    model = MODELS["qwen3"]
    requests = make_requests(16, seed=8, groups=4)
    plain = plainly(model, requests)
    engine = engine_with_all(model, plain, max_batch=16)
    engine.choose = lambda n: strategy
    assert_same(collect(engine, requests), plain)
    lengths = {"right": lambda x: x > 1 + 0.7 * strategy.depth, "wrong": lambda x: x < 1.2}
    if strategy.drafter in lengths:
        assert lengths[strategy.drafter](engine.stats.accept_length)


def test_stop_strings_cut_where_plain_decoding_stops():
    model = MODELS["llama"]

    def decode(tokens):
        return "".join(chr(97 + t % 26) for t in tokens)

    requests = make_requests(48, seed=5, groups=12, stops=(), stop=("ab", "qzx", "e"))
    plain = plainly(model, requests, decode)
    assert {c.finish_reason for c in plain.values()} == {"stop", "length"}
    engine = engine_with_all(model, plain, decode=decode, max_batch=16)
    dice = random.Random(1)
    engine.choose = lambda n: dice.choice(STRATEGIES)
    assert_same(collect(engine, requests), plain)


histories = st.fixed_dictionaries(
    {
        "family": st.sampled_from(list(MODELS)),
        "sampling": st.sampled_from(list(SAMPLINGS)),
        "batch": st.sampled_from([1, 2, 5, 32]),
        "page_size": st.sampled_from([8, 16, 64]),
        "pages": st.sampled_from([None, 40, 80]),
        "seed": st.integers(0, 10**6),
        "count": st.integers(1, 12),
        "pause": st.integers(0, 30),
    }
)


@given(histories, st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_any_history(h, strategies):
    """Any order of strategies, batch and page sizes, too few pages, a pause of everything in mid-flight."""
    model = MODELS[h["family"]]
    groups = max(1, h["count"] // 2)
    requests = make_requests(h["count"], seed=h["seed"], groups=groups, shortest=20, **SAMPLINGS[h["sampling"]])
    plain = plainly(model, requests)
    engine = engine_with_all(
        model, plain, h["seed"], max_batch=h["batch"], page_size=h["page_size"], pages=h["pages"], max_length=160
    )
    turn = iter(range(10**9))
    engine.choose = lambda n: strategies[next(turn) % len(strategies)]
    engine.submit(requests)
    done = {}
    while engine.unfinished:
        done |= {c.request.id: c for c in engine.step()}
        if engine.stats.decode_steps == h["pause"]:
            engine.pause()
    assert_same(done, plain)


def test_a_smaller_draft_vocabulary():
    model = MODELS["llama"]
    requests = make_requests(12, seed=2)
    plain = plainly(model, requests)
    neural = random_neural(model, vocab=torch.arange(3, 128, 5))
    engine = RolloutEngine(
        model, EngineSettings(), None, [neural], [s for s in STRATEGIES if s.drafter in ("plain", "neural")]
    )
    dice = random.Random(4)
    engine.choose = lambda n: dice.choice(engine.strategies)
    assert_same(collect(engine, requests), plain)


def test_the_embedded_model_with_its_own_drafter(embedded):
    """Real sequences, real acceptance: draft tokens are accepted, and nothing changes."""
    from paceline.core import Request, SamplingParams
    from paceline.draft.eagle.drafter import EagleDrafter
    from paceline.draft.eagle.files import load_drafter
    from paceline.model import load_model
    from paceline.model.tokenizer import load_tokenizer
    from paceline.tasks.countdown import Countdown

    model, tokenizer = load_model("embedded", "float64"), load_tokenizer("embedded")
    task = Countdown("medium", "search", seed=4)
    sampling = SamplingParams(max_tokens=120, stop_token_ids=tokenizer.eos_ids)
    requests = [Request(i, tuple(tokenizer.encode_prompt(task.sample(i // 4).prompt)), sampling) for i in range(32)]
    plain = plainly(model, requests)
    drafters = [EagleDrafter(load_drafter(embedded / "drafter", model)), SuffixDrafter(32, 1280)]
    engine = RolloutEngine(model, EngineSettings(max_batch=32), None, drafters)
    dice = random.Random(6)
    engine.choose = lambda n: dice.choice(engine.strategies[1:])
    assert_same(collect(engine, requests), plain)
    assert engine.stats.accept_length > 1.5


def test_rows_that_pad_a_graph_do_no_harm():
    """On a GPU a batch is padded to a captured size. The same padding here: what an earlier draft left in rows that are
    no longer used must not be taken for a tree."""
    model, requests = MODELS["llama"], make_requests(40, seed=6, groups=10)
    plain = plainly(model, requests)
    engine = engine_with_all(model, plain, max_batch=24)
    runner, dice = engine.runner, random.Random(3)
    runner.shape = lambda count: PassShape(count, bucket(runner.ladder, count), False)
    engine.choose = lambda n: dice.choice(STRATEGIES)
    assert_same(collect(engine, requests), plain)
