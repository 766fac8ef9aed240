"""On a GPU: graphs change nothing, stay valid when weights change, and a step reads from the device once."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels import device
from paceline.kernels.hopper import matmul
from paceline.kernels.hopper.matmul import Tile
from paceline.rollout import EngineSettings, RolloutEngine

from ..conftest import tiny_model
from .test_engine import make_requests

pytestmark = pytest.mark.gpu


def run(model, requests, **settings):
    engine = RolloutEngine(model, EngineSettings(**settings))
    return {c.request.id: c.tokens for c in engine.run(requests)}, engine


def on_gpu(dtype=torch.float32, **changes):
    return tiny_model(dtype=dtype, **changes).to("cuda")


def differing(a: dict, b: dict) -> int:
    assert a.keys() == b.keys()
    return sum(a[k] != b[k] for k in a)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"min_tokens": 1}], ids=str)
def test_graphs_do_not_change_tokens(sampling):
    model, requests = on_gpu(), make_requests(40, groups=10, **sampling)
    graphed, engine = run(model, requests)
    assert engine.runner.graphs is not None
    eager, _ = run(model, requests, cuda_graphs=False)
    assert differing(graphed, eager) == 0


def test_gpu_and_cpu_draw_the_same_tokens():
    requests = make_requests(40, groups=10)
    gpu, _ = run(on_gpu(), requests, page_size=16)
    cpu, _ = run(tiny_model(dtype=torch.float32), requests)
    assert differing(gpu, cpu) <= 1, "but for a near-tie"


def test_batches_pages_and_pauses_do_not_matter():
    model, requests = on_gpu(), make_requests(60, groups=12, shortest=40, stops=())
    base, _ = run(model, requests)
    for settings in (
        {"max_batch": 5},
        {"page_size": 16, "pages": 60},
        {"page_size": 8, "prefill_tokens": 50},
    ):
        other, _ = run(model, requests, **settings)
        assert differing(base, other) <= 1, settings


def test_bfloat16_runs_and_mostly_agrees_with_itself():
    model, requests = on_gpu(torch.bfloat16), make_requests(40, groups=10, longest=20)
    one, _ = run(model, requests)
    other, _ = run(model, requests, cuda_graphs=False)
    assert differing(one, other) <= 2


def test_graphs_see_weights_that_change_in_place():
    model, requests = on_gpu(), make_requests(10)
    before, engine = run(model, requests)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
    after = {c.request.id: c.tokens for c in engine.run(requests)}
    fresh, _ = run(model, requests, cuda_graphs=False)
    assert differing(after, fresh) == 0 and differing(before, after) > 0


def test_a_decode_step_reads_from_the_device_once():
    engine = RolloutEngine(on_gpu())
    engine.submit(make_requests(8, shortest=60, stops=()))
    for _ in range(3):
        engine.step()
    steps = 20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
    reads = sum(e.count for e in profile.key_averages() if "Memcpy DtoH" in e.key)
    assert reads == steps, f"{reads} reads in {steps} steps"


def test_a_speculative_round_is_two_replays_and_one_read(monkeypatch):
    from paceline.draft.eagle.drafter import EagleDrafter
    from paceline.draft.eagle.model import DrafterShape, EagleModel
    from paceline.draft.strategy import Strategy

    model, chosen = on_gpu(), [Strategy.parse(s) for s in ("neural:3", "neural:4x3/8")]
    drafter = EagleDrafter(EagleModel(model, DrafterShape(64, 16)).init_weights(1))
    engine = RolloutEngine(model, EngineSettings(max_batch=8), None, [drafter], chosen)
    replays = []
    run_graph = engine.runner.graphs.run
    monkeypatch.setattr(engine.runner.graphs, "run", lambda key, *rest: replays.append(key[0]) or run_graph(key, *rest))
    for strategy in chosen:
        engine.choose = lambda n, s=strategy: s
        engine.submit(make_requests(8, shortest=60, stops=(), seed=strategy.nodes))
        for _ in range(3):
            engine.step()
        replays.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                engine.step()
        reads = sum(e.count for e in profile.key_averages() if "Memcpy DtoH" in e.key)
        assert reads == 5 and replays == ["draft", "verify"] * 5
        engine.clear()


@pytest.mark.parametrize("early", [False, True])
def test_products_of_our_own_and_early_launches_change_nothing(early, monkeypatch):
    model, requests = on_gpu(family="qwen2"), make_requests(40, groups=10)
    base, _ = run(model, requests)
    monkeypatch.setattr(matmul, "tile_for", lambda rows, weight: Tile(64, 64, 3) if rows <= 64 else None)
    monkeypatch.setattr(device, "pdl", early)
    own, _ = run(model, requests)
    assert differing(base, own) <= 1, "but for a near-tie"


@pytest.mark.parametrize("graphs", [True, False])
def test_speculation_writes_what_plain_decoding_writes(graphs):
    """The same exactness as on a CPU, through the Triton kernel and captured graphs, in float32."""
    import random

    from paceline.draft.strategy import Strategy

    from .test_exactness import collect, engine_with_all

    model = tiny_model(dtype=torch.float32).cuda()
    requests = make_requests(48, seed=4, groups=12, longest=80)
    plain = collect(RolloutEngine(model, EngineSettings(max_batch=48, cuda_graphs=graphs)), requests)
    engine = engine_with_all(model, plain, max_batch=8, cuda_graphs=graphs)
    dice = random.Random(2)
    few = [Strategy.parse(s) for s in ("plain", "suffix:3", "neural:3", "neural:4x3/8", "chaos:4x3")]
    engine.choose = lambda n: dice.choice(few)
    done = collect(engine, requests)
    assert {i: c.tokens for i, c in done.items()} == {i: c.tokens for i, c in plain.items()}
    assert engine.stats.accept_length > 1.2
