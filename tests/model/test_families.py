"""A model family of the same dense shape is one entry in `FAMILIES`: nothing else has to know of it."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.errors import UserError
from paceline.model import Decoder, DecoderConfig, load_model, save_model
from paceline.model.attention import PackedAttention
from paceline.model.config import FAMILIES, Family

from ..conftest import tiny_config, tiny_model

NEW = "renamed"


def logits(model: Decoder) -> torch.Tensor:
    tokens = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(0))
    attention = PackedAttention([25, 15], tokens.device)
    with torch.no_grad():
        return model.logits(model(tokens, attention.positions(), attention)[0])


@pytest.mark.parametrize(
    ("family", "flags", "changes"),
    [
        ("llama", Family("RenamedForCausalLM", o_bias=True), {"attention_bias": True}),
        ("qwen2", Family("RenamedForCausalLM", qkv_bias=True, optional_window=True), {"sliding_window": 16}),
        ("qwen3", Family("RenamedForCausalLM", o_bias=True, qk_norm=True), {"tie_word_embeddings": True}),
    ],
)
def test_a_new_family_is_one_entry(family, flags, changes, tmp_path, monkeypatch):
    """Named anew, a checkpoint loads, computes and is saved as that of the family whose flags it has."""
    original = tiny_model(family, **changes)
    save_model(original, tmp_path / "original")
    file = tmp_path / "original" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": NEW}))
    with pytest.raises(UserError, match="of family 'renamed', which Paceline does not run"):
        load_model(str(tmp_path / "original"), "float64")
    monkeypatch.setitem(FAMILIES, NEW, flags)
    loaded = load_model(str(tmp_path / "original"), "float64")
    assert loaded.config.family == NEW and torch.equal(logits(loaded), logits(original))
    assert loaded.config.max_positions == original.config.max_positions
    save_model(loaded, tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (saved["model_type"], saved["architectures"]) == (NEW, ["RenamedForCausalLM"])
    assert torch.equal(logits(load_model(str(tmp_path / "again"), "float64")), logits(original))


def test_families_differ_by_their_flags():
    shapes = {name: DecoderConfig.from_hf(tiny_config(name, attention_bias=True)) for name in FAMILIES}
    assert {name for name, c in shapes.items() if c.o_bias} == {"llama", "qwen3"}
    assert {name for name, c in shapes.items() if c.qk_norm} == {"qwen3"}
    assert all(c.qkv_bias for c in shapes.values())
    plain = {name: DecoderConfig.from_hf(tiny_config(name)) for name in FAMILIES}
    assert {name for name, c in plain.items() if c.qkv_bias} == {"qwen2"}
