"""The same requests give the same tokens, whatever the engine does with them on the way."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.core import Completion, Request, SamplingParams
from paceline.errors import UserError
from paceline.rollout import EngineSettings, RolloutEngine

from ..conftest import tiny_model

MODEL = tiny_model()


def make_requests(
    count: int,
    seed: int = 0,
    groups: int | None = None,
    longest: int = 60,
    shortest: int = 1,
    stops=(1, 5),
    **sampling,
) -> list[Request]:
    r = random.Random(seed)
    prompts = [tuple(r.randrange(2, 128) for _ in range(r.randint(3, 40))) for _ in range(groups or count)]
    out = []
    for i in range(count):
        s = SamplingParams(max_tokens=r.randint(shortest, longest), stop_token_ids=stops, **sampling)
        out.append(Request(1000 + i, prompts[i % len(prompts)], s, seed=11))
    return out


def run(requests: list[Request], model=MODEL, decode=None, **settings) -> dict[int, Completion]:
    engine = RolloutEngine(model, EngineSettings(**settings), decode)
    done = {}
    for completion in engine.run(requests):
        assert completion.request.id not in done, "a request was completed twice"
        done[completion.request.id] = completion
    assert done.keys() == {r.id for r in requests}, "a request was lost"
    assert engine.pool.free == engine.pool.usable, "pages leaked"
    return done


def assert_same(a: dict[int, Completion], b: dict[int, Completion]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].tokens == b[key].tokens and a[key].finish_reason == b[key].finish_reason
        assert torch.allclose(torch.tensor(a[key].logprobs), torch.tensor(b[key].logprobs), atol=1e-9)


def reference(request: Request, model=MODEL) -> list[int]:
    """Plain decoding with no cache, no batch and no engine: the whole sequence through the model for every token."""
    from paceline.kernels.noise import gumbel, position_keys, request_key
    from paceline.model.attention import PackedAttention

    tokens = list(request.prompt)
    s = request.sampling
    key = torch.tensor([request_key(request.seed, request.id)])
    while True:
        attention = PackedAttention([len(tokens)], torch.device("cpu"))
        hidden, _ = model(torch.tensor(tokens), attention.positions(), attention)
        noise = gumbel(position_keys(key, torch.tensor([len(tokens)])), 128, torch.float64)[0]
        tokens.append(int((model.logits(hidden[-1]) / s.temperature + noise).argmax()))
        written = len(tokens) - len(request.prompt)
        if tokens[-1] in s.stop_token_ids or written == s.max_tokens:
            return tokens[len(request.prompt) :]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_equals_decoding_by_hand(family):
    changes = {"sliding_window": None} if family == "mistral" else {}
    model = tiny_model(family, **changes)
    requests = make_requests(6, temperature=0.8)
    done = run(requests, model)
    for request in requests:
        assert done[request.id].tokens == reference(request, model)


BASE = make_requests(48, groups=12)


def test_order_batch_and_page_size_do_not_matter():
    plain = run(BASE)
    assert len({tuple(c.tokens) for c in plain.values()}) > 40, "the requests differ"
    shuffled = BASE[:]
    random.Random(1).shuffle(shuffled)
    assert_same(plain, run(shuffled))
    for settings in (
        {"max_batch": 1},
        {"max_batch": 7},
        {"page_size": 4},
        {"page_size": 16, "max_batch": 5},
        {"page_size": 512},
        {"prefill_tokens": 1},
        {"prefill_tokens": 30, "max_batch": 20, "page_size": 8},
    ):
        assert_same(plain, run(BASE, **settings))


def test_sampling_parameters_of_neighbours_do_not_matter():
    mixed = [
        Request(r.id, r.prompt, SamplingParams(max_tokens=25, **s), seed=r.seed)
        for r, s in zip(
            BASE,
            [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 1.5}, {}] * 8,
            strict=True,
        )
    ]
    together = run(mixed)
    for request in mixed[:12]:
        assert_same({request.id: together[request.id]}, run([request]))


@pytest.mark.parametrize("every", [1, 3, 10])
def test_a_forced_pause_changes_nothing(every):
    plain = run(BASE[:16])
    engine = RolloutEngine(MODEL, EngineSettings(page_size=8, max_batch=10))
    engine.submit(BASE[:16])
    done, steps = {}, 0
    while engine.unfinished:
        for completion in engine.step():
            done[completion.request.id] = completion
        steps += 1
        if steps % (every + 1) == 0:
            engine.pause()
    assert engine.scheduler.paused > 0
    assert_same(plain, done)


def test_requests_that_arrive_later_do_not_matter():
    plain = run(BASE)
    engine = RolloutEngine(MODEL, EngineSettings(max_batch=9, page_size=8))
    todo, done = BASE[:], {}
    while todo or engine.unfinished:
        if todo:
            engine.submit([todo.pop()])
        done |= {c.request.id: c for c in engine.step()}
    assert_same(plain, done)


def test_the_first_request_never_waits_for_pages():
    """Whoever came last is paused, so what was begun first ends first."""
    requests = make_requests(20, seed=5, longest=60, shortest=60, stops=())
    engine = RolloutEngine(MODEL, EngineSettings(page_size=8, pages=60, max_batch=20))
    engine.submit(requests)
    steps, done = 0, []
    while not done:
        done, steps = engine.step(), steps + 1
    assert engine.scheduler.paused > 0, "the budget was never felt"
    assert done[0].request == requests[0] and steps <= 1 + requests[0].sampling.max_tokens


def test_200_requests_with_pages_for_10():
    requests = make_requests(200, seed=5, groups=50, shortest=40, stops=())
    pages_each = -(-100 // 8)
    engine_pages = 10 * pages_each + 1
    plain = run(requests, page_size=8)
    tight = RolloutEngine(MODEL, EngineSettings(page_size=8, pages=engine_pages, max_batch=200))
    done: dict[int, Completion] = {}
    for completion in tight.run(requests):
        assert completion.request.id not in done
        done[completion.request.id] = completion
    assert tight.scheduler.paused > 0, "the budget was never felt"
    assert tight.pool.free == tight.pool.usable
    assert_same(plain, done)


def test_a_pool_for_exactly_one_request_still_finishes_all():
    requests = [Request(i, (3, 4, 5), SamplingParams(max_tokens=29)) for i in range(6)]
    assert_same(run(requests), run(requests, page_size=8, pages=5))


def test_the_prompt_of_a_group_is_prefilled_once():
    prompt = tuple(range(2, 52))
    requests = [Request(i, prompt, SamplingParams(max_tokens=5)) for i in range(16)]
    engine = RolloutEngine(MODEL, EngineSettings(page_size=16))
    list(engine.run(requests))
    assert engine.stats.prefill_tokens == len(prompt)
    engine = RolloutEngine(MODEL, EngineSettings(page_size=16, max_batch=3))  # the rest of the group comes in later
    list(engine.run(requests))
    assert engine.stats.prefill_tokens == len(prompt)


def test_completions_stream_out_as_they_finish():
    requests = [Request(i, (7, 8, 9), SamplingParams(max_tokens=n, min_tokens=n)) for i, n in enumerate((30, 3, 12))]
    engine = RolloutEngine(MODEL)
    order = [c.request.id for c in engine.run(requests)]
    assert order == [1, 2, 0]
    assert engine.stats.decode_steps == 29


def test_stop_tokens_and_lengths():
    done = run(make_requests(40, longest=20))
    for completion in done.values():
        s = completion.request.sampling
        if completion.finish_reason == "stop":
            assert completion.tokens[-1] in s.stop_token_ids
        else:
            assert len(completion.tokens) == s.max_tokens
        assert not set(completion.tokens[:-1]) & set(s.stop_token_ids)
    assert {c.finish_reason for c in done.values()} == {"stop", "length"}


def test_min_tokens_keeps_stop_tokens_out_of_the_race():
    stops = tuple(range(1, 9))
    requests = [
        Request(i, (20, 21), SamplingParams(max_tokens=40, min_tokens=15, stop_token_ids=stops)) for i in range(30)
    ]
    done = run(requests)
    assert all(not set(c.tokens[:15]) & set(stops) for c in done.values())
    assert any(set(c.tokens) & set(stops) for c in done.values())
    assert_same(done, run(requests, max_batch=4))


def decode(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + t % 26) for t in tokens)


def test_stop_strings_count_from_min_tokens_on():
    sampling = SamplingParams(max_tokens=60, min_tokens=15, stop=tuple("abcdefghijklmnopqrstuvwxyz"))
    done = run([Request(i, (20 + i, 30), sampling) for i in range(5)], decode=decode)
    assert [(len(c.tokens), c.finish_reason) for c in done.values()] == [(15, "stop")] * 5


def test_stop_strings_end_an_answer_where_they_are_completed():
    free = run([Request(i, (20 + i, 30), SamplingParams(max_tokens=60)) for i in range(30)])
    texts = {i: decode(free[i].tokens) for i in range(30)}
    stops = {i: text[20:22] for i, text in texts.items()}
    got = run(
        [Request(i, (20 + i, 30), SamplingParams(max_tokens=60, stop=(stops[i], "never!"))) for i in range(30)],
        decode=decode,
    )
    cut = 0
    for i in range(30):
        first = texts[i].index(stops[i]) + 2
        assert got[i].finish_reason == "stop" and got[i].tokens == free[i].tokens[:first]
        cut += first < 22
    assert cut, "some stop string occurs before its first place"


def test_logprobs_are_those_of_the_policy_at_the_temperature():
    from paceline.model.attention import PackedAttention

    request = Request(3, (9, 8, 7), SamplingParams(temperature=0.7, top_k=3, max_tokens=20))
    completion = run([request])[3]
    tokens = [*request.prompt, *completion.tokens]
    attention = PackedAttention([len(tokens)], torch.device("cpu"))
    hidden, _ = MODEL(torch.tensor(tokens), attention.positions(), attention)
    logp = (MODEL.logits(hidden) / 0.7).log_softmax(-1)
    expected = [float(logp[2 + i, t]) for i, t in enumerate(completion.tokens)]
    assert torch.allclose(torch.tensor(completion.logprobs), torch.tensor(expected), atol=1e-9)


def test_the_context_is_the_last_limit():
    done = run([Request(0, tuple(range(2, 102)), SamplingParams(max_tokens=400))], max_length=110)
    assert len(done[0].tokens) == 10 and done[0].finish_reason == "length"


def test_what_cannot_run_is_said_at_once():
    engine = RolloutEngine(MODEL, EngineSettings(page_size=8, pages=4))
    with pytest.raises(UserError, match="KV pages"):
        engine.submit([Request(0, (1, 2), SamplingParams(max_tokens=100))])
    with pytest.raises(UserError, match="no room"):
        RolloutEngine(MODEL).submit([Request(0, (2,) * 512)])
    with pytest.raises(ValueError, match="unique"):
        RolloutEngine(MODEL).submit([Request(0, (2,)), Request(0, (2,))])
    with pytest.raises(ValueError, match="decode"):
        RolloutEngine(MODEL).submit([Request(0, (2,), SamplingParams(stop=("x",)))])
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)


def test_clear_leaves_a_usable_engine():
    engine = RolloutEngine(MODEL, EngineSettings(max_batch=4))
    engine.submit(BASE)
    for _ in range(5):
        engine.step()
    engine.clear()
    assert engine.unfinished == 0 and engine.pool.free == engine.pool.usable
    assert_same({c.request.id: c for c in engine.run(BASE[:8])}, run(BASE[:8]))
