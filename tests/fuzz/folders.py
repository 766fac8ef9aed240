"""Model folders to damage: the embedded reasoner, and a small tied model of another family in several files, with a
list of ending tokens, a chat template and a drafter with a reduced vocabulary."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paceline.draft.eagle.files import save_drafter
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.model import load_model
from paceline.model.checkpoint import EMBEDDED
from tests.fuzz.mutate_files import VALUES, damage_bytes, damage_value, misplace, replace, write_json

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}<|assistant|>"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OTHERS = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
NUMBERS = (float("nan"), float("inf"), -float("inf"), 3e38, 1e30, -1e5)

MODEL_KEYS: tuple[tuple[str, Any], ...] = (
    ("quantization_config", {"quant_method": "fp8"}),
    ("compression_config", {"format": "pack-quantized"}),
    ("auto_map", {"AutoModelForCausalLM": "modeling.Model", "AutoTokenizer": ["tok.T", None]}),
    ("configuration_files", ["config.4.0.0.json", "../../config.json"]),
    ("num_hidden_layers", 10**12),
    ("num_hidden_layers", 4096),
    ("hidden_size", 2**20),
    ("vocab_size", 2**24),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0}),
    ("rope_parameters", {"rope_type": "linear"}),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("eos_token_id", [3, 10**6]),
    ("tokenizer_class", 7),
    ("tie_word_embeddings", "yes"),
    ("paceline", {"style": 3}),
)
TOKENIZER_KEYS: tuple[tuple[str, Any], ...] = (
    ("auto_map", {"AutoTokenizer": ["tok.T", "tok.T"]}),
    ("trust_remote_code", True),
    ("vocab_file", "OUTSIDE/vocab.json"),
    ("tokenizer_file", "OUTSIDE/tokenizer.json"),
    ("gguf_file", "OUTSIDE/x.gguf"),
    ("init_inputs", ["OUTSIDE/tokenizer.json"]),
    ("fast_tokenizer_files", ["tokenizer.5.0.0/../../outside/tokenizer.json"]),
    ("chat_template", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
    ("chat_template", "{{ messages[0].nothing.at.all }}"),
    ("chat_template", "{{ raise_exception('no') }}"),
    ("chat_template", {"default": 3}),
    ("tokenizer_class", "Qwen2Tokenizer"),
    ("tokenizer_class", "LlamaTokenizer"),
    ("eos_token", {"content": 3}),
    ("added_tokens_decoder", {"x": {}}),
    ("added_tokens_decoder", {"999999": {"content": "1"}}),
)
DRAFTER_KEYS: tuple[tuple[str, Any], ...] = (
    ("quantization_config", {"quant_method": "int8"}),
    ("eagle_config", {"eagle_aux_hidden_state_layer_ids": "123"}),
    ("eagle_config", 3),
    ("speculators_model_type", "eagle3"),
    ("transformer_layer_config", {"intermediate_size": 5}),
    ("intermediate_size", 2**24),
    ("paceline", {"window": 0, "trained": {"answers": "many"}}),
    ("paceline", {"window": -1}),
    ("sliding_window", 2**40),
    ("architectures", [["LlamaForCausalLMEagle3"]]),
)
KEYS = {"config.json": MODEL_KEYS, "tokenizer_config.json": TOKENIZER_KEYS, "special_tokens_map.json": TOKENIZER_KEYS}


def make_bases(folder: Path) -> list[Path]:
    shutil.copytree(EMBEDDED, folder / "embedded")
    make_small(folder / "small")
    return [folder / "embedded", folder / "small"]


def make_small(folder: Path) -> None:
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>", "<unk>"])}
    vocab |= {chr(c): len(vocab) + i for i, c in enumerate(range(32, 127))} | {"\n": len(vocab) + 95}
    tokens = Tokenizer(models.BPE(vocab, [("a", "b")] if "ab" in vocab else [], unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokens.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
    )
    hf.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=[1, 3],
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                         "original_max_position_embeddings": 64},
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=[1, 3], temperature=0.7, do_sample=True)
    model.save_pretrained(folder, max_shard_size="12KB")
    hf.save_pretrained(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    policy = load_model(str(folder), "float32")
    drafter = EagleModel(policy, DrafterShape(40, 32), torch.arange(0, 90, 2)).init_weights(1)
    save_drafter(drafter, folder / "drafter", {"policy": "small", "task": "countdown", "answers": 5, "tokens": 9})


def make_outside(base: Path, outside: Path) -> None:
    """Files that would work, but belong to somebody else."""
    shutil.copytree(base, outside)
    (outside / "x.gguf").write_bytes(b"GGUF CANARY")
    (outside / "vocab.json").write_text('{"CANARY": 0}')
    for file in outside.rglob("config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"CANARY": "CANARY"}))
    for file in outside.rglob("*.safetensors"):
        save_file(load_file(file), file, metadata={"format": "pt", "CANARY": "CANARY"})


def copy_base(base: Path, folder: Path) -> None:
    """Weights by hard links: damage always writes a new file."""
    shutil.copytree(base, folder, copy_function=lambda a, b: Path(b).hardlink_to(a))


def damage(r: random.Random, folder: Path, outside: Path) -> str:
    """One fault -> what it was"""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    if not files:
        return "nothing is left"
    texts = [p for p in files if p.suffix in (".json", ".jinja")]
    weights = [p for p in files if p.suffix == ".safetensors"]
    kind = r.choices(("value", "bytes", "weights", "header", "elsewhere", "index"), (8, 4, 4, 2, 2, 1))[0]
    if kind == "value" and texts:
        file = r.choice(texts)
        return f"value in {file.name}" if file.suffix == ".json" and _damage_json(r, file, outside) else _bytes(r, file)
    if kind == "weights" and weights:
        return _damage_weights(r, r.choice(weights), folder)
    if kind == "header" and weights:
        return _damage_header(r, r.choice(weights))
    if kind == "index" and (folder / "model.safetensors.index.json").is_file():
        return _damage_index(r, folder, outside)
    if kind == "elsewhere":
        file = r.choice([*files, folder / "drafter", folder / "additional_chat_templates"])
        target = outside if file.parent == folder else outside / "drafter"
        return f"{misplace(r, file, target)} as {file.name}"
    return _bytes(r, r.choice(files))


def _bytes(r: random.Random, file: Path) -> str:
    replace(file, damage_bytes(r, file.read_bytes()))
    return f"bytes of {file.name}"


def _damage_json(r: random.Random, file: Path, outside: Path) -> bool:
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return False  # damaged already
    keys = DRAFTER_KEYS if file.parent.name == "drafter" else KEYS.get(file.name, ())
    text = json.dumps(damage_value(r, value, keys)).replace("OUTSIDE", str(outside))
    write_json(r, file, json.loads(text))
    return True


def _damage_weights(r: random.Random, file: Path, folder: Path) -> str:
    """Sound files with other tensors in them."""
    try:
        tensors = load_file(file)
    except Exception as err:  # noqa: BLE001 (damaged already, in whatever way)
        return f"{file.name} is damaged: {type(err).__name__}"
    name = r.choice(sorted(tensors))
    value, kind = tensors[name].clone(), r.randrange(8)
    if kind == 0 and value.is_floating_point() and value.numel():
        value.view(-1)[r.randrange(value.numel())] = min(r.choice(NUMBERS), torch.finfo(value.dtype).max)
        tensors[name] = value
    elif kind == 1:
        tensors[name] = value.to(r.choice(OTHERS))
    elif kind == 2:
        tensors[name] = value.to(r.choice(FLOATS))
    elif kind == 3:
        tensors[name.replace(".weight", r.choice((".weight_scale", ".weight_scale_inv", ".qweight", ".other")))] = value
    elif kind == 4:
        del tensors[name]
    elif kind == 5:
        tensors[name] = r.choice(
            (value[:0], value[None], value.reshape(-1), value[:1], value.repeat(2, *[1] * (value.dim() - 1)))
        )
    elif kind == 6:
        tensors["model." + name] = value
    else:
        tensors[name] = torch.randint(-(2**40), 2**40, value.shape) if name == "d2t" else value * 0
    file.unlink()
    save_file({n: t.contiguous() for n, t in tensors.items()}, file)
    return f"tensor {name} of {file.name}, {kind}"


def _damage_header(r: random.Random, file: Path) -> str:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    if r.random() < 0.3:
        new = r.choice((0, 1, size - 1, size + 1, 2**63, 2**64 - 1, 100 * 10**6 + 1, len(data) - 8, r.randrange(2**20)))
        replace(file, new.to_bytes(8, "little") + data[8:])
        return f"size of the header of {file.name}"
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError):
        return _bytes(r, file)
    changed = damage_value(r, header)
    if isinstance(changed, dict) and r.random() < 0.4:
        entry = changed.get(r.choice(sorted(changed)) if changed else "")
        if isinstance(entry, dict):
            entry["dtype"] = r.choice(
                ("I8", "F8_E4M3", "F8_E5M2", "U16", "I64", "F4", "C64", "F16", "BF16", *VALUES[:6])
            )
    text = json.dumps(changed).encode()
    replace(file, len(text).to_bytes(8, "little") + text + data[8 + size :])
    return f"header of {file.name}"


def _damage_index(r: random.Random, folder: Path, outside: Path) -> str:
    file = folder / "model.safetensors.index.json"
    try:
        index = json.loads(file.read_bytes())
        names = index["weight_map"]
        first = r.choice(sorted(names))
        other = names[r.choice(sorted(names))]
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        return _bytes(r, file)
    there = str(outside / other) if isinstance(other, str) else ""
    names[first] = r.choice(
        (there, f"../{outside.name}/{other}", f"./{other}", other, "", ".", "..", "/dev/zero", 7, "config.json")
    )
    replace(file, json.dumps(index).encode())
    return f"weight_map: {names[first]}"
