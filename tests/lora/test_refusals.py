"""Adapters that cannot be used are refused in one sentence, by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import load_config
from paceline.errors import UserError
from paceline.lora.files import find_adapter
from paceline.lora.start import begin_lora, decide_lora
from paceline.model import load_model

from .peft_pair import peft_pair

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    peft_pair(folder, "llama", ["q_proj", "v_proj"])
    return folder


def start(made: Path, adapter: Path, *words: str) -> None:
    config = decide_lora(load_config(None, [f"learn.lora.path={adapter}", *words]), resumed=False)
    begin_lora(load_model(str(made / "base")), config, None)


def changed(made: Path, out: Path, **config: object) -> Path:
    shutil.copytree(made / "adapter", out)
    file = out / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return out


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"use_dora": True}, "sets use_dora, which Paceline does not compute"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "sets rank_pattern"),
        ({"bias": "all"}, "has bias = all"),
        ({"peft_type": "IA3"}, "of type IA3; Paceline trains LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = pissa_niter_4, which changes the base"),
        ({"r": 0}, "'r' = 0"),
        ({"lora_alpha": "x"}, "'lora_alpha' = 'x'"),
    ],
    ids=str,
)
def test_configs(config, problem, made, tmp_path):
    with pytest.raises(UserError) as said:
        start(made, changed(made, tmp_path / "adapter", **config))
    assert problem in str(said.value) and "adapter_config.json" in str(said.value)


def spoil(made: Path, out: Path, change) -> Path:
    shutil.copytree(made / "adapter", out)
    tensors = load_file(out / WEIGHTS)
    change(tensors)
    save_file(tensors, out / WEIGHTS)
    return out


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop(FIRST), f"has no tensor {FIRST}: it was made for another model or other targets"),
        (
            lambda t: t.update({FIRST: torch.zeros(4, 7)}),
            "has shape [4, 7], but the model and learn.lora need",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 48)}),
            "holds the tensor",
        ),
        (lambda t: t.update({FIRST.replace(".0.", ".9."): torch.zeros(4, 48)}), "which the model has no place for"),
        (lambda t: t[FIRST].fill_(float("nan")), "holds NaN or infinite numbers"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
    ids=["missing", "shape", "head", "layers", "nan", "empty"],
)
def test_tensors(change, problem, made, tmp_path):
    with pytest.raises(UserError) as said:
        start(made, spoil(made, tmp_path / "adapter", change))
    assert problem in str(said.value) and WEIGHTS in str(said.value)


def test_folders(made, tmp_path):
    with pytest.raises(UserError, match=r"no adapter folder at \./nowhere"):
        find_adapter("./nowhere")
    with pytest.raises(UserError, match=r"has no adapter_config\.json, so it is not the folder of an adapter"):
        start(made, made / "base")
    bare = changed(made, tmp_path / "bare")
    (bare / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"has no adapter_model\.safetensors; save the adapter with safetensors"):
        start(made, bare)


def test_settings_that_contradict_the_adapter(made):
    with pytest.raises(UserError, match=r"learn\.lora\.rank is 8, but the adapter at .* has 4"):
        start(made, made / "adapter", "learn.lora.rank=8")
    with pytest.raises(UserError, match=r"learn\.lora\.alpha is 1, but"):
        start(made, made / "adapter", "learn.lora.alpha=1")
    with pytest.raises(UserError, match=r"has the targets q_proj, v_proj, not learn\.lora\.targets"):
        start(made, made / "adapter", "learn.lora.targets=[q_proj]")
    start(made, made / "adapter", "learn.lora.rank=4", "learn.lora.targets=[v_proj,q_proj]")
