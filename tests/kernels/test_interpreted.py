"""The engine on its kernels writes what it writes without them: the whole of it, in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from paceline.core import Request, SamplingParams
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.strategy import Strategy
from paceline.draft.suffix.drafter import SuffixDrafter
from paceline.kernels import device, fused
from paceline.kernels.hopper import matmul, normed_matmul
from paceline.kernels.hopper.matmul import Tile
from paceline.rollout import EngineSettings, RolloutEngine

from ..conftest import tiny_model


def answers(model, requests, strategies, monkeypatch, kernels):
    monkeypatch.setattr(fused, "interpreted", kernels)
    hidden = model.config.hidden_size

    def tile_for(rows, weight):
        if rows == 1:
            return Tile(4, 64, 2, vector=True, preload=True, norm=True)
        residual = (
            rows % 2 == 0 and weight.shape[0] == hidden
        )  # fused for even numbers of rows, so that both are tested
        return Tile(16, 64, weight_first=False, residual=True) if residual else Tile(64, 64, 2)

    for module in (matmul, normed_matmul):
        monkeypatch.setattr(module, "tile_for", tile_for)
    monkeypatch.setattr(device, "INTERPRETED_SMS", 2)  # more would only take longer
    device.num_sms.cache_clear()
    drafter = EagleDrafter(EagleModel(model, DrafterShape(64, 16)).init_weights(5, std=0.1))
    chosen = [Strategy.parse(s) for s in strategies]
    engine = RolloutEngine(
        model, EngineSettings(max_batch=3, page_size=16), None, [SuffixDrafter(3, 128), drafter], chosen
    )
    upcoming = itertools.cycle(chosen)
    engine.choose = lambda count: next(upcoming)
    done = {c.request.id: c for c in engine.run(requests)}
    return [done[i].tokens for i in sorted(done)], [done[i].logprobs for i in sorted(done)]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        pytest.param("qwen3", {}, marks=pytest.mark.soak),
        pytest.param("llama", {"mlp_bias": True, "attention_bias": True}, marks=pytest.mark.soak),
    ],
)
def test_kernels_change_no_token(family, changes, monkeypatch):
    small = {"num_hidden_layers": 3, "vocab_size": 104, "num_attention_heads": 3, "num_key_value_heads": 1}
    model = tiny_model(family, dtype=torch.float32, **small, **changes)
    prompts = [(4, 5, 4), (100, 2, 60, 61, 62, 63, 64)]
    sampling = [SamplingParams(0.0, max_tokens=5), SamplingParams(0.7, max_tokens=7)]
    requests = [Request(i, p, s) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))]
    strategies = ("neural:2", "plain", "neural:2x2/3")
    tokens, logprobs = answers(model, requests, strategies, monkeypatch, kernels=False)
    got, got_logprobs = answers(model, requests, strategies, monkeypatch, kernels=True)
    device.num_sms.cache_clear()
    assert got == tokens
    flat = [torch.tensor(list(itertools.chain(*x))) for x in (got_logprobs, logprobs)]
    torch.testing.assert_close(*flat, rtol=1e-4, atol=1e-4)
