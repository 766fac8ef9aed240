"""Merged weights are made from the base, which is kept bit by bit, and written in place."""

from __future__ import annotations

import torch

from paceline.lora.adapters import MERGE_CHUNK, Lora
from paceline.lora.base import digest
from paceline.lora.shape import LoraShape
from paceline.model import Decoder

from ..conftest import tiny_model

SHAPE = LoraShape(4, 8.0, ("q_proj", "v_proj", "up_proj", "down_proj"))


def bits(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


def shake(lora: Lora, generator: torch.Generator, size: float = 0.05) -> None:
    with torch.no_grad():
        for parameter in lora.parameters.values():
            parameter.add_(torch.empty(parameter.shape).normal_(0, size, generator=generator))
    lora.merge()


def test_the_base_is_there_bit_by_bit_after_many_updates():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        model = tiny_model("qwen2", dtype=dtype)
        before = bits(model)
        where = {name: p.data_ptr() for name, p in model.named_parameters()}
        lora = Lora(model, SHAPE)
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            shake(lora, generator)
        assert not same(bits(model), before)
        changed = {name for name, now in bits(model).items() if not torch.equal(now, before[name])}
        assert {name.rpartition(".")[2] for name in changed} == {"qkv", "gate_up", "down"}
        heads, key = 6 * 16, 2 * 16
        qkv, was = model.layers[1].qkv.detach(), before["layers.1.qkv"]
        assert torch.equal(qkv[heads : heads + key], was[heads : heads + key]), "k_proj is no target"
        assert not torch.equal(qkv[:heads], was[:heads]) and not torch.equal(qkv[heads + key :], was[heads + key :])
        lora.restore()
        assert same(bits(model), before)
        with torch.no_grad():
            for name, parameter in lora.parameters.items():
                if "lora_B" in name:
                    parameter.zero_()
        lora.merge()
        assert all(torch.equal(now, before[name]) for name, now in bits(model).items()), "adapters that do nothing"
        assert where == {name: p.data_ptr() for name, p in model.named_parameters()}, "in place"


def test_rounding_does_not_accumulate():
    """After any number of updates the weights are those of one merge, in bfloat16 too."""
    model = tiny_model(dtype=torch.bfloat16)
    lora = Lora(model, SHAPE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        shake(lora, generator)
    fresh = Lora(tiny_model(dtype=torch.bfloat16), SHAPE)
    fresh.load(lora.parameters)
    assert same(bits(model), bits(fresh.model))
    base = tiny_model(dtype=torch.bfloat16).layers[0].down.float()
    a, b = (lora.parameters[f"model.layers.0.mlp.down_proj.lora_{x}.weight"] for x in "AB")
    assert torch.equal(model.layers[0].down, (base + 2.0 * b @ a).bfloat16())


def test_pieces_make_the_same_weights(monkeypatch):
    lora = Lora(tiny_model(dtype=torch.float64), SHAPE)
    shake(lora, torch.Generator().manual_seed(0))
    whole = bits(lora.model)
    assert MERGE_CHUNK > 48 * 96
    monkeypatch.setattr("paceline.lora.adapters.MERGE_CHUNK", 1000)
    lora.merge()
    for name, now in bits(lora.model).items():
        torch.testing.assert_close(now, whole[name], rtol=1e-14, atol=1e-14)


def test_the_reference_is_the_base_and_goes_away_again():
    model = tiny_model(dtype=torch.bfloat16)
    base = bits(model)
    lora = Lora(model, SHAPE)
    generator = torch.Generator().manual_seed(0)
    shake(lora, generator)
    first = bits(model)
    with lora.reference() as shown:
        assert shown is model and same(bits(model), base)
    assert same(bits(model), first)
    lora.keep_start()  # as a run that began with an adapter
    shake(lora, generator)
    now = bits(model)
    with lora.reference():
        assert same(bits(model), first)
    assert same(bits(model), now) and not same(now, first)


def test_a_digest_tells_weights_apart():
    weights = {"a": torch.randn(64, 33).bfloat16(), "b": torch.randn(7, 5)}
    whole = digest(weights)
    assert digest({name: t.clone() for name, t in weights.items()}) == whole
    assert digest({"a": torch.randn(7, 5)[1:4]}) != digest({"a": torch.zeros(3, 5)}), "at any offset"
    for name, flat in ((name, t.view(-1).view(torch.uint8)) for name, t in weights.items()):
        for i in (0, 17, len(flat) - 1):
            flat[i] ^= 1
            assert digest(weights) != whole, (name, i)
            flat[i] ^= 1
    assert digest(weights) == whole
    weights["a"][[0, 1]] = weights["a"][[1, 0]]
    assert digest(weights) != whole, "rows that changed places"
