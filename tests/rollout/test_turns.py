"""Several turns with observations between them: whatever is drafted, in whatever batch, however late an observation
comes and whoever had the pages meanwhile, the tokens are those that the policy writes turn by turn. In float64, where
rounding cannot flip a race."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core import Completion, Observation, Request
from paceline.rollout import EngineSettings, RolloutEngine

from ..conftest import tiny_model
from .conversations import answer, converse, turn_by_turn
from .drafters import STRATEGIES
from .test_engine import assert_same, make_requests
from .test_exactness import MODELS, SAMPLINGS, engine_with_all

TIED = tiny_model("qwen3", seed=5, tie_word_embeddings=True)
ALL = MODELS | {"tied": TIED}


def acting(count: int, seed: int, **more) -> list[Request]:
    """Turns end often, at one of several stop tokens."""
    more = {"longest": 150, "shortest": 100, "stops": tuple(range(1, 9)), "groups": max(1, count // 3)} | more
    return make_requests(count, seed=seed, **more)


def same(done: dict[int, Completion], expected: dict[int, Completion]) -> None:
    assert_same(done, expected)
    for i, completion in done.items():
        assert completion.observed == expected[i].observed
        assert all(completion.logprobs[k] == 0.0 for a, b in completion.observed for k in range(a, b))


@pytest.mark.parametrize("family", ALL)
def test_the_same_as_turn_by_turn(family):
    model = ALL[family]
    requests = acting(9, seed=3)
    expected = turn_by_turn(model, requests)
    assert sum(len(c.observed) for c in expected.values()) > 8, "there are conversations"
    for batch in (1, 5, 32):
        engine = engine_with_all(model, expected, max_batch=batch, page_size=16)
        dice = random.Random(batch)
        engine.choose = lambda n, dice=dice: dice.choice(STRATEGIES)
        same(converse(engine, requests, random.Random(batch)), expected)
        assert engine.stats.drafted_sequences > 0


histories = st.fixed_dictionaries(
    {
        "family": st.sampled_from(list(ALL)),
        "sampling": st.sampled_from(list(SAMPLINGS)),
        "batch": st.sampled_from([1, 2, 5, 32]),
        "page_size": st.sampled_from([8, 16, 64]),
        "pages": st.sampled_from([None, 40, 80]),
        "overlap": st.booleans(),
        "seed": st.integers(0, 5),
        "count": st.sampled_from([1, 3, 8]),
        "pause": st.integers(0, 30),
        "order": st.integers(0, 10**6),
    }
)


@cache
def reference(family: str, sampling: str, count: int, seed: int) -> tuple[list[Request], dict[int, Completion]]:
    more = SAMPLINGS[sampling]
    requests = acting(count, seed, shortest=20, longest=110, **more)
    return requests, turn_by_turn(ALL[family], requests)


@given(histories, st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_any_history(h, strategies):
    """Any order of strategies and of observations, batch and page sizes, too few pages, a pause in mid-flight."""
    requests, expected = reference(h["family"], h["sampling"], h["count"], h["seed"])
    more = {key: h[key] for key in ("page_size", "pages", "overlap")}
    engine = engine_with_all(ALL[h["family"]], expected, h["seed"], max_batch=h["batch"], max_length=160, **more)
    turn = iter(range(10**9))
    engine.choose = lambda n: strategies[next(turn) % len(strategies)]
    same(converse(engine, requests, random.Random(h["order"]), h["pause"]), expected)


def test_what_was_computed_stays():
    """With pages for all, no token but the last of a turn goes through the policy twice."""
    model = MODELS["qwen3"]
    requests = acting(12, seed=1)
    expected = turn_by_turn(model, requests)
    engine = RolloutEngine(model, EngineSettings(max_batch=12, page_size=16))
    same(converse(engine, requests, random.Random(0)), expected)
    prompts = sum(len(prompt) for prompt in {r.prompt for r in requests})
    observed = sum(b - a + 1 for c in expected.values() for a, b in c.observed)
    assert observed > 200
    assert engine.stats.prefill_tokens == prompts + observed


def test_pages_are_lent_and_the_slot_too():
    """Fewer pages than the conversations fill together, and a batch of one: others go on meanwhile."""
    model = MODELS["llama"]
    requests = acting(10, seed=4, groups=10)
    expected = turn_by_turn(model, requests)
    engine = RolloutEngine(model, EngineSettings(max_batch=1, page_size=8, pages=40, max_length=240))
    same(converse(engine, requests, random.Random(0), late=True), expected)
    observed = sum(b - a + 1 for c in expected.values() for a, b in c.observed)
    prompts = sum(len(r.prompt) for r in requests)
    assert engine.stats.prefill_tokens > prompts + observed, "some were computed again"


def test_written_ahead_up_to_the_end_of_a_turn():
    model = MODELS["mistral"]
    requests = acting(12, seed=9)
    expected = turn_by_turn(model, requests)
    ahead = {i: c.tokens[: c.observed[0][0]] if c.observed else c.tokens for i, c in expected.items()}
    engine = engine_with_all(model, expected, max_batch=12, page_size=16)
    same(converse(engine, requests, random.Random(1), ahead=ahead), expected)
    assert engine.stats.ahead_accepted > 50


def test_stop_strings_look_at_the_turn_only():
    def decode(tokens):
        return "".join(chr(97 + t % 26) for t in tokens)

    model = MODELS["llama"]
    requests = acting(9, seed=5, stops=(), stop=("ab", "qz", "e"))
    expected = turn_by_turn(model, requests, decode)
    assert sum(len(c.observed) for c in expected.values()) > 5
    engine = engine_with_all(model, expected, decode=decode, max_batch=8)
    dice = random.Random(1)
    engine.choose = lambda n: dice.choice(STRATEGIES)
    same(converse(engine, requests, random.Random(2)), expected)


def test_dropped_between_two_turns():
    model = MODELS["llama"]
    engine = RolloutEngine(model, EngineSettings(max_batch=4))
    requests = [Request(r.id, r.prompt, r.sampling, r.seed, acts=True) for r in acting(4, seed=2)]
    engine.submit(requests)
    while not engine.scheduler.suspended:
        engine.step()
    assert engine.take_turns()
    engine.clear()
    assert not engine.unfinished and not engine.take_turns() and engine.pool.free == engine.pool.usable
    engine.submit(requests)  # none of them is known any more
    while engine.runnable:
        engine.step()
    assert engine.unfinished == len(engine.take_turns()) == 4


def test_an_observation_that_leaves_no_room_ends_the_completion():
    model = MODELS["llama"]
    (request,) = acting(1, seed=2, shortest=150)
    engine = RolloutEngine(model, EngineSettings(max_batch=1))
    engine.submit([Request(request.id, request.prompt, request.sampling, request.seed, acts=True)])
    while engine.runnable:
        engine.step()
    (turn,) = engine.take_turns()
    assert turn.finish_reason == "stop" and not engine.step()
    done = engine.observe(Observation(request.id, 0, [3] * (150 - len(turn.tokens))))
    assert done and done.finish_reason == "length" and done.tokens == turn.tokens and not done.observed
    assert answer(turn) == answer(turn) and not engine.unfinished and engine.pool.free == engine.pool.usable
