"""Drafters on disk: what is saved is loaded, and one made for another policy is refused in one sentence."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.draft.eagle.files import load_drafter, save_drafter
from paceline.draft.eagle.model import DrafterShape, EagleModel, new_drafter
from paceline.errors import UserError

from ..conftest import tiny_model

MODEL = tiny_model()


def saved(folder, vocab=None):
    drafter = EagleModel(MODEL, DrafterShape(64, 32), vocab).init_weights(5)
    save_drafter(drafter, folder)
    return drafter


@pytest.mark.parametrize("vocab", [None, torch.arange(2, 100, 3)], ids=["all", "some"])
def test_round_trip(tmp_path, vocab):
    drafter = saved(tmp_path, vocab)
    other = load_drafter(tmp_path, MODEL)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), other.parameters(), strict=True))
    assert other.shape == drafter.shape
    x = torch.randn(3, 48, dtype=torch.float64)
    assert torch.equal(drafter.logits(x), other.logits(x))


def test_names_are_those_that_serving_engines_read(tmp_path):
    saved(tmp_path, torch.arange(64))
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["fc.weight"].shape == (48, 144)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (96, 96)
    assert {"d2t", "t2d", "lm_head.weight", "norm.weight", "midlayer.hidden_norm.weight"} <= tensors.keys()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def drop(folder, name):
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")


SPOILED = {
    "hidden size": (lambda f: edit(f, hidden_size=64), "hidden_size 64, but the policy has 48"),
    "vocabulary": (lambda f: edit(f, vocab_size=99), "vocab_size 99"),
    "features": (lambda f: edit(f, paceline={"feature_layers": [1, 2, 3]}), r"features from layers \[1, 2, 3\]"),
    "tensor": (lambda f: drop(f, "fc.weight"), "lacks the tensor fc.weight"),
    "no config": (lambda f: (f / "config.json").unlink(), "no drafter at"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "broken weights": (lambda f: (f / "model.safetensors").write_bytes(b"xx"), "cannot be read"),
    "no drafter": (lambda f: edit(f, architectures=["LlamaForCausalLM"]), "not a drafter"),
    "shape": (lambda f: edit(f, intermediate_size=80), "has shape"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_drafter_that_does_not_fit_is_refused(tmp_path, what):
    saved(tmp_path)
    spoil, message = SPOILED[what]
    spoil(tmp_path)
    with pytest.raises(UserError, match=message):
        load_drafter(tmp_path, MODEL)


@pytest.mark.parametrize("first_used_to_infer", [False, True])
def test_head_rows_follow_the_policy(first_used_to_infer):
    model = tiny_model(seed=9)
    drafter = EagleModel(model, DrafterShape(64, 32), torch.tensor([3, 5, 7]))
    with torch.inference_mode(first_used_to_infer):
        rows = drafter.head()
    with torch.no_grad():
        model.head.weight.add_(1)
    drafter.refresh()
    assert drafter.head() is rows and torch.equal(rows, model.head.weight[[3, 5, 7]])


def test_a_new_drafter_takes_after_the_last_layer_that_does_something():
    model = tiny_model(seed=4)
    with torch.no_grad():
        model.layers[-1].o.zero_()
        model.layers[-1].down.zero_()
    drafter, layer = new_drafter(model, 32, seed=0), model.layers[-2]
    for name in ("input_norm", "o", "post_norm", "gate_up", "down"):
        assert torch.equal(getattr(drafter.layer, name), getattr(layer, name)), name
    assert drafter.layer.qkv.shape[1] == 2 * model.config.hidden_size
    with torch.no_grad():
        for layer in model.layers:
            layer.o.zero_()
            layer.down.zero_()
    assert not new_drafter(model, 32, seed=0).layer.down.any(), "if none does, the last"
