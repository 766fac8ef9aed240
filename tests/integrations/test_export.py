"""Drafters in the forms of other engines: what is written, and that nothing is lost on the way out and back."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.draft.eagle.files import load_drafter, save_drafter
from paceline.draft.eagle.loss import read_sequences
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.eagle.trainer import EagleTrainer, TrainSettings
from paceline.errors import UserError
from paceline.integrations.export import export_drafter
from paceline.integrations.export_formats import FORMATS
from paceline.model.checkpoint import save_model

from ..conftest import tiny_model

MODEL = tiny_model(num_hidden_layers=8)
SOME = torch.arange(2, 100, 3)
KINDS = {"whole": (None, False), "trimmed": (SOME, False), "own head": (SOME, True)}


def make(folder, model=MODEL, vocab=None, own_head=False):
    """A policy with a drafter beside it."""
    drafter = EagleModel(model, DrafterShape(64, 32, own_head), vocab).init_weights(5)
    save_model(model, folder)
    save_drafter(drafter, folder / "drafter")
    return drafter


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def edit(folder, drop=(), **changes):
    kept = {name: value for name, value in config_of(folder).items() if name not in drop}
    (folder / "config.json").write_text(json.dumps(kept | changes))


def retensor(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def same(a: EagleModel, b: EagleModel) -> bool:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return all(n == m and torch.equal(x, y) for (n, x), (m, y) in pairs)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_out_and_back_is_bit_equal(tmp_path, form, kind):
    drafter = make(tmp_path / "policy", MODEL, *KINDS[kind])
    written = export_drafter(str(tmp_path / "policy"), tmp_path / "out", form)
    back = load_drafter(tmp_path / "out", MODEL)
    assert same(drafter, back) and back.shape == drafter.shape
    x = torch.randn(3, 48, dtype=torch.float64)
    assert torch.equal(drafter.logits(x), back.logits(x))
    again = export_drafter(str(tmp_path / "out"), tmp_path / "again", form, model=str(tmp_path / "policy"))
    assert again["policy_sha256"] == written["policy_sha256"]
    assert config_of(tmp_path / "again") == config_of(tmp_path / "out")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again"))
    assert first == second


def test_formats_tell_layers_window_and_head_each_in_its_way(tmp_path):
    make(tmp_path / "policy")
    files = {}
    for form in FORMATS:
        export_drafter(str(tmp_path / "policy"), tmp_path / form, form, depth=4, policy_name="owner/policy")
        files[form] = config_of(tmp_path / form), load_file(tmp_path / form / "model.safetensors")
    (vllm, tensors), (sglang, _), (spec, numbered) = files["vllm"], files["sglang"], files["speculators"]
    assert vllm["architectures"] == sglang["architectures"] == ["LlamaForCausalLMEagle3"]
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and "eagle_config" not in vllm
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert "eagle_aux_hidden_state_layer_ids" not in sglang and sglang["draft_vocab_size"] is None
    assert vllm["sliding_window"] == 32 and vllm["layer_types"] == ["sliding_attention"]
    assert "sliding_window" not in sglang and "--speculative-draft-window-size 32" in card(tmp_path / "sglang")
    for config in (vllm, sglang, spec["transformer_layer_config"]):
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
        assert config["max_position_embeddings"] == 512 and config["num_hidden_layers"] == 1
    assert "lm_head.weight" not in tensors and tensors["midlayer.self_attn.q_proj.weight"].shape == (96, 96)
    assert spec["speculators_config"]["verifier"]["name_or_path"] == "owner/policy"
    assert spec["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert torch.equal(numbered["lm_head.weight"], MODEL.head.weight) and "layers.0.hidden_norm.weight" in numbered


def test_a_window_as_long_as_the_policy_is_none(tmp_path):
    save_model(MODEL, tmp_path)
    save_drafter(EagleModel(MODEL, DrafterShape(64, 512)).init_weights(5), tmp_path / "drafter")
    export_drafter(str(tmp_path), tmp_path / "out")
    assert "sliding_window" not in config_of(tmp_path / "out") and "looks back" not in card(tmp_path / "out")


def test_head_rows_are_those_of_the_policy_that_is_exported(tmp_path):
    make(tmp_path / "policy", vocab=SOME)
    other = tiny_model(num_hidden_layers=8, seed=3)
    save_model(other, tmp_path / "moved")
    export_drafter(str(tmp_path / "policy/drafter"), tmp_path / "out", model=str(tmp_path / "moved"))
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["lm_head.weight"], other.head.weight[SOME])


def card(folder) -> str:
    return (folder / "README.md").read_text()


def foreign(folder, kind="whole", form="vllm"):
    """A drafter that says nothing of Paceline."""
    drafter = make(folder / "policy", MODEL, *KINDS[kind])
    export_drafter(str(folder / "policy"), folder / "theirs", form)
    edit(folder / "theirs", drop=["paceline"])
    return drafter, folder / "theirs"


DIALECTS = {
    "as it is": lambda f: None,
    "SGLang's count": lambda f: edit(
        f, ["eagle_aux_hidden_state_layer_ids"], eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    ),
    "own count in the same place": lambda f: edit(
        f, ["eagle_aux_hidden_state_layer_ids"], eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    ),
    "layers taken for granted": lambda f: edit(f, ["eagle_aux_hidden_state_layer_ids"]),
    "prefix": lambda f: retensor(f, lambda ts: {f"model.{n}": t for n, t in ts.items()}),
    "number": lambda f: retensor(f, lambda ts: {n.replace("midlayer", "layers.0"): t for n, t in ts.items()}),
    "embeddings": lambda f: retensor(f, lambda ts: ts | {"embed_tokens.weight": torch.zeros(128, 48)}),
    "short positions": lambda f: edit(f, max_position_embeddings=64),
    "no vocabulary size": lambda f: edit(f, ["draft_vocab_size"]),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_drafters_from_elsewhere_are_read(tmp_path, dialect):
    drafter, theirs = foreign(tmp_path)
    DIALECTS[dialect](theirs)
    back = load_drafter(theirs, MODEL)
    assert same(drafter, back) and back.shape == DrafterShape(64, 32)


def test_a_head_from_elsewhere_is_kept_and_trained_unless_it_is_the_policys(tmp_path):
    _, theirs = foreign(tmp_path, "trimmed")
    assert load_drafter(theirs, MODEL).own_head is None, "the policy's rows"
    moved = tiny_model(num_hidden_layers=8, seed=3)
    drafter = load_drafter(theirs, moved)
    assert drafter.own_head is not None and torch.equal(drafter.own_head, MODEL.head.weight[SOME])
    trainer = EagleTrainer(drafter, TrainSettings(runs=2))
    trainer.step(read_sequences(drafter, [(list(range(30)), 4)]))
    trainer.publish()
    assert not torch.equal(drafter.own_head, MODEL.head.weight[SOME])


FOREIGN_FAULTS = {
    "layers": (lambda f: edit(f, eagle_aux_hidden_state_layer_ids=[1, 2, 3]), r"features from layers \[1, 2, 3\]"),
    "kind": (lambda f: edit(f, norm_before_residual=True), "has norm_before_residual, which drafters here"),
    "kind inside": (lambda f: edit(f, eagle_config={"norm_before_fc": True}), "has norm_before_fc"),
    "depth": (lambda f: edit(f, num_hidden_layers=2), "has 2 layers, but drafters have one"),
    "rope": (lambda f: edit(f, ["rope_parameters"], rope_theta=5e5), "rope_theta 500000 .default., but the policy"),
    "other width": (lambda f: edit(f, target_hidden_size=64), "target_hidden_size 64"),
    "head_dim": (lambda f: edit(f, head_dim=32), "head_dim 32"),
    "vocabulary": (lambda f: edit(f, vocab_size=50), "vocab_size 50, but the policy has 128"),
    "sizes": (lambda f: edit(f, ["intermediate_size"]), "no intermediate_size"),
    "tensor": (lambda f: retensor(f, lambda ts: ts | {"fc.bias": torch.zeros(48)}), "tensor fc.bias, which"),
    "map": (lambda f: retensor(f, lambda ts: ts | {"d2t": ts["d2t"] + 99}), "d2t of the drafter"),
    "bin": (lambda f: (f / "model.safetensors").rename(f / "model.bin"), "save the model with safetensors"),
    "nested": (lambda f: edit(f, speculators_model_type="eagle3"), "no transformer_layer_config"),
    "other kind": (lambda f: edit(f, speculators_model_type="dflash"), "type dflash, not eagle3"),
}


@pytest.mark.parametrize("fault", FOREIGN_FAULTS)
def test_what_cannot_be_brought_in_is_refused_in_one_sentence(tmp_path, fault):
    _, theirs = foreign(tmp_path, "trimmed")
    spoil, message = FOREIGN_FAULTS[fault]
    spoil(theirs)
    with pytest.raises(UserError, match=message) as error:
        load_drafter(theirs, MODEL)
    assert "\n" not in str(error.value)


def test_unnamed_layers_of_a_shallow_policy_are_refused(tmp_path):
    shallow = tiny_model()
    make(tmp_path / "policy", shallow)
    export_drafter(str(tmp_path / "policy"), tmp_path / "out")
    assert config_of(tmp_path / "out")["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]
    edit(tmp_path / "out", drop=["paceline", "eagle_aux_hidden_state_layer_ids"])
    with pytest.raises(UserError, match="does not say which layers its features come from"):
        load_drafter(tmp_path / "out", shallow)
    with pytest.raises(UserError, match="SGLang cannot give a drafter what enters the first layer"):
        export_drafter(str(tmp_path / "policy"), tmp_path / "sglang", "sglang")
    assert not list(tmp_path.glob("*sglang*")), "nothing is left behind"
