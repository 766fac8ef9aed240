"""Models that would run wrongly, run somebody's code, or read somebody's files are refused by name, before anything is
allocated; what looks alike but is sound still loads."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.draft.eagle.files import load_drafter
from paceline.errors import UserError
from paceline.integrations.export import export_policy
from paceline.library.engine import Engine
from paceline.model import Decoder, load_model
from paceline.model.checkpoint import read_config
from paceline.model.config import DecoderConfig
from paceline.model.tokenizer import load_tokenizer
from tests.conftest import tiny_config
from tests.fuzz.folders import copy_base, make_outside, make_small
from tests.fuzz.mutate_files import Watch, deadline, replace

CHAT = [{"role": "user", "content": "Make 9 from 4 5."}]
SHARD = "model-00002-of-00005.safetensors"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "small"
    make_small(folder)
    return folder


@pytest.fixture
def model(small, tmp_path):
    copy_base(small, tmp_path / "model")
    return tmp_path / "model"


def edit(file, **changes):
    values = json.loads(file.read_text()) if file.exists() else {}
    replace(file, json.dumps(values | changes).encode())


def retensor(file, change):
    tensors = load_file(file)
    file.unlink()
    save_file({name: t.contiguous() for name, t in change(tensors).items()}, file)


def spoil(value):
    """The first tensor of a file gets a value somewhere."""

    def change(tensors):
        name = sorted(tensors)[0]
        tensors[name].view(-1)[-1] = value
        return tensors

    return change


def as_type(dtype):
    return lambda tensors: tensors | {name: t.to(dtype) for name, t in list(tensors.items())[:1]}


def with_tensor(ending):
    return lambda tensors: tensors | {f"model.layers.0.mlp.up_proj.{ending}": torch.ones(1)}


def remap(folder, to):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: to if at == SHARD else at for name, at in index["weight_map"].items()}
    replace(folder / "model.safetensors.index.json", json.dumps(index).encode())


def doubled(folder):
    """A tensor in a second file as well, where the index does not say it is."""
    name, tensor = next(iter(load_file(folder / SHARD).items()))
    retensor(folder / "model-00001-of-00005.safetensors", lambda ts: ts | {name: tensor})


def pipe(file):
    file.unlink()
    os.mkfifo(file)


CONFIG, SETTINGS = "config.json", "tokenizer_config.json"
WEIGHTS = {
    "quantized": (lambda f: edit(f / CONFIG, quantization_config={"quant_method": "fp8"}), r"is quantized \(fp8\)"),
    "compressed": (lambda f: edit(f / CONFIG, compression_config={"format": "x"}), "is quantized"),
    "fp8": (
        lambda f: retensor(f / SHARD, as_type(torch.float8_e4m3fn)),
        f"in .*{SHARD} is of type F8_E4M3",
    ),
    "int8": (lambda f: retensor(f / SHARD, as_type(torch.int8)), "tensor model.* is of type I8"),
    "scale": (
        lambda f: retensor(f / SHARD, with_tensor("weight_scale_inv")),
        "up_proj.weight_scale_inv, .*quantized",
    ),
    "packed": (lambda f: retensor(f / SHARD, with_tensor("qweight")), "up_proj.qweight, so .*quantized"),
    "NaN": (lambda f: retensor(f / SHARD, spoil(float("nan"))), f"tensor model.* in .*{SHARD} holds the value nan"),
    "infinite": (lambda f: retensor(f / SHARD, spoil(-float("inf"))), "holds the value -inf"),
    "damaged": (lambda f: retensor(f / SHARD, spoil(1e38)), "holds the value .*is the file damaged"),
    "absolute": (lambda f: remap(f, str(f.parent / "outside" / SHARD)), "not a file of that folder"),
    "above": (lambda f: remap(f, f"../outside/{SHARD}"), "not a file of that folder"),
    "long name": (lambda f: remap(f, "m" * 5000 + ".safetensors"), "not a file of that folder"),
    "config as weights": (lambda f: remap(f, CONFIG), "not a .safetensors file"),
    "other file": (lambda f: remap(f, "model-00001-of-00005.safetensors"), "does not hold it"),
    "double": (doubled, "index.json says that it is in"),
    "pipe": (lambda f: pipe(f / SHARD), "not an ordinary file"),
    "layers": (lambda f: edit(f / CONFIG, num_hidden_layers=10**12), "'num_hidden_layers' = 1000000000000"),
    "more layers": (lambda f: edit(f / CONFIG, num_hidden_layers=4000), "implies .* weights, but its files hold"),
    "wide": (lambda f: edit(f / CONFIG, hidden_size=2**20), "has shape .* but config.json implies"),
    "code": (lambda f: edit(f / CONFIG, auto_map={"AutoModel": "m.M"}), "Python code of its own"),
}


def link_out(folder, name):
    (folder / name).unlink()
    (folder / name).symlink_to(folder.parent / "outside" / name)


WEIGHTS |= {f"link {name}": (lambda f, n=name: link_out(f, n), "outside its folder") for name in (SHARD, CONFIG)}


@pytest.mark.parametrize("what", WEIGHTS)
def test_weights_that_are_refused(small, model, tmp_path, what):
    make_outside(small, tmp_path / "outside")
    damage, message = WEIGHTS[what]
    damage(model)
    watch = Watch(tmp_path / "outside")
    for use in (lambda: load_model(str(model)), lambda: export_policy(str(model), tmp_path / "out")):
        with deadline(), pytest.raises(UserError, match=message) as error:
            use()
        assert "\n" not in str(error.value)
    assert not watch.opened() and not (tmp_path / "out").exists()
    watch.close()


TOKENIZERS = {
    "code": (lambda f: edit(f / SETTINGS, auto_map={"AutoTokenizer": ["t.T", "t.T"]}), "Python code"),
    "trust": (lambda f: edit(f / SETTINGS, trust_remote_code=True), "trust_remote_code"),
    "vocabulary": (lambda f: edit(f / SETTINGS, vocab_file=str(f.parent / "outside/vocab.json")), "vocab_file"),
    "inputs": (lambda f: edit(f / SETTINGS, init_inputs=[str(f.parent / "outside/x")]), "init_inputs"),
    "special": (
        lambda f: edit(f / "special_tokens_map.json", tokenizer_file=str(f.parent / "outside/tokenizer.json")),
        "'tokenizer_file' in .* not a special token",
    ),
    "versions": (lambda f: edit(f / SETTINGS, fast_tokenizer_files=["../outside/tokenizer.json"]), "not a file of"),
    "template name": (lambda f: edit(f / SETTINGS, chat_template={"../x": "y"}), "not a file of"),
    "added": (lambda f: edit(f / SETTINGS, added_tokens_decoder={str(10**12): {"content": "a"}}), "10"),
    "link": (lambda f: link_out(f, "tokenizer.json"), "outside its folder"),
    "pipe": (lambda f: pipe(f / "tokenizer.json"), "not an ordinary file"),
    "not JSON": (lambda f: replace(f / "tokenizer.json", b"{"), "no tokenizer could be loaded"),
    "other JSON": (lambda f: replace(f / "tokenizer.json", b'{"model": 3}'), "no tokenizer could be loaded"),
    "ends": (lambda f: edit(f / "generation_config.json", eos_token_id=[1, 999]), "token 999"),
    "ends of another type": (lambda f: edit(f / "generation_config.json", eos_token_id="1"), "eos_token_id"),
}  # fmt: skip


@pytest.mark.parametrize("what", TOKENIZERS)
def test_tokenizers_that_are_refused(small, model, tmp_path, what):
    make_outside(small, tmp_path / "outside")
    (model / "t.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass T: pass\n")
    damage, message = TOKENIZERS[what]
    damage(model)
    watch = Watch(tmp_path / "outside")
    for use in (lambda: load_tokenizer(str(model)), lambda: export_policy(str(model), tmp_path / "out")):
        with deadline(), pytest.raises(UserError, match=message) as error:
            use()
        assert "\n" not in str(error.value)
    assert not watch.opened() and not (tmp_path / "ran").exists()
    watch.close()


BAD_SIZES = [
    ("num_hidden_layers", 0), ("num_hidden_layers", -1), ("num_hidden_layers", True), ("num_hidden_layers", 4.0),
    ("num_hidden_layers", "4"), ("num_hidden_layers", None), ("hidden_size", 2**30), ("vocab_size", 0),
    ("num_attention_heads", []), ("num_key_value_heads", 4), ("head_dim", 7), ("intermediate_size", -5),
    ("max_position_embeddings", 2**40), ("rms_norm_eps", 0), ("rms_norm_eps", -1e-6), ("rms_norm_eps", "x"),
    ("rope_theta", 0), ("rope_theta", -1.0), ("eos_token_id", -1), ("eos_token_id", 128), ("eos_token_id", [1, "2"]),
    ("eos_token_id", 1.5), ("tie_word_embeddings", 1), ("hidden_act", 3), ("sliding_window", "all"),
    ("rope_scaling", {"rope_type": "linear"}), ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
    ("rope_scaling", {"rope_type": "yarn"}), ("rope_scaling", {"rope_type": "yarn", "factor": 0}), ("rope_scaling", 7),
    ("rope_scaling", {"rope_type": "linear", "factor": float("inf")}), ("rope_scaling", {"rope_type": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD_SIZES)
def test_sizes_that_no_model_has(key, value):
    with pytest.raises(UserError) as error:
        DecoderConfig.from_hf(tiny_config(**{key: value}), "the model")
    said = str(error.value)
    assert "\n" not in said and any(word in said for word in (key, "heads", "factor", "rope"))


def test_a_sound_model_works(model):
    """Tied, in several files, with a list of ending tokens, and asked in a chat."""
    engine = Engine(str(model), drafter="auto", dtype="float32")
    assert engine.tokenizer.eos_ids == (1, 3) and engine.model.config.tied
    chat, text = engine.generate([CHAT, "Make 9 from 4 5.\n"], max_tokens=6, temperature=0)
    assert chat[0].tokens and text[0].tokens


def test_counted_weights_are_those_of_the_model(small):
    for family in ("llama", "qwen2", "qwen3", "mistral"):
        for tied in (False, True):
            config = DecoderConfig.from_hf(
                tiny_config(family, tie_word_embeddings=tied, mlp_bias=tied, attention_bias=tied)
            )
            unique = {id(p): p.numel() for p in Decoder(config).parameters()}
            assert config.parameters == sum(unique.values())
    assert read_config(small).parameters == sum(
        t.numel() for file in small.glob("*.safetensors") for t in load_file(file).values()
    )


def test_paths_of_the_machine_where_a_tokenizer_was_made_are_not_followed(model, tmp_path):
    """Old versions wrote them; they mean nothing."""
    edit(
        model / "tokenizer_config.json",
        tokenizer_file="/elsewhere/x/tokenizer.json",
        special_tokens_map_file="/elsewhere/x/special_tokens_map.json",
        name_or_path="/elsewhere/x",
    )
    assert load_tokenizer(str(model)).encode_prompt(CHAT)


def test_the_hubs_cache_is_made_of_links(small, tmp_path):
    """snapshots/X/ links to blobs/, also from folders within."""
    home = tmp_path / "models--a--b"
    blobs, snapshot = home / "blobs", home / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    for i, file in enumerate(p for p in sorted(small.rglob("*")) if p.is_file()):
        shutil.copyfile(file, blobs / str(i))
        link = snapshot / file.relative_to(small)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / str(i), link.parent))
    policy = load_model(str(snapshot), "float32")
    assert load_tokenizer(str(snapshot)).encode_prompt(CHAT)
    load_drafter(snapshot / "drafter", policy)
    export_policy(str(snapshot), tmp_path / "out")
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())


def test_tokens_that_the_model_does_not_have(model):
    """A tokenizer may know more tokens than its model, as long as they do not occur."""
    edit(model / "tokenizer_config.json", extra_special_tokens=["<|user|>", "<|assistant|>", "<|system|>", "<new>"])
    tokenizer = load_tokenizer(str(model))
    assert tokenizer.encode_prompt("old")
    with pytest.raises(UserError, match=r"the prompt of line 3 with token 102, but the model has only 102 tokens"):
        tokenizer.encode_prompt("a <new> one", "line 3")


def change_tensor(name, change):
    return lambda f: retensor(f / "model.safetensors", lambda tensors: tensors | {name: change(tensors[name])})


DRAFTERS = {
    "NaN": (change_tensor("fc.weight", lambda t: t * float("nan")), "holds the value nan"),
    "int8": (change_tensor("fc.weight", lambda t: t.to(torch.int8)), "I8"),
    "float map": (change_tensor("d2t", lambda t: t.float()), "d2t .* F32"),
    "square map": (change_tensor("d2t", lambda t: t[None]), "d2t .* shape"),
    "empty map": (change_tensor("d2t", lambda t: t[:0]), "d2t .* shape"),
    "far map": (change_tensor("d2t", lambda t: t + 2**40), "d2t of the drafter"),
    "wide": (lambda f: edit(f / CONFIG, intermediate_size=2**24), "has shape"),
    "window": (lambda f: edit(f / CONFIG, paceline={"window": "far"}), "window"),
    "layers": (lambda f: edit(f / CONFIG, eagle_config={"eagle_aux_hidden_state_layer_ids": "012"}), "eagle_aux"),
    "section": (lambda f: edit(f / CONFIG, eagle_config=3), "eagle_config"),
    "list": (lambda f: replace(f / CONFIG, b"[]"), "not an object"),
    "pipe": (lambda f: pipe(f / "model.safetensors"), "not an ordinary file"),
    "quantized": (lambda f: edit(f / CONFIG, quantization_config={"quant_method": "int8"}), "quantized"),
}  # fmt: skip


@pytest.mark.parametrize("what", DRAFTERS)
def test_drafters_that_are_refused(model, what):
    damage, message = DRAFTERS[what]
    damage(model / "drafter")
    with deadline(), pytest.raises(UserError, match=message) as error:
        load_drafter(model / "drafter", load_model(str(model), "float32"))
    assert "\n" not in str(error.value)
