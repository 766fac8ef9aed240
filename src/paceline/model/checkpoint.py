"""Checkpoints in Hugging Face form: read from a folder or a hub id, written so that `transformers` loads them.

In the decoder q/k/v and gate/up are fused; in checkpoints they have their usual names. `fused_parts` knows both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import UserError
from paceline.files.reading import inside, named_path, read_object, shorten
from paceline.model.config import FAMILIES, DecoderConfig
from paceline.model.decoder import Decoder, as_dtype
from paceline.model.foreign_config import ForeignConfig, foreign_config
from paceline.model.weights import INDEX, WEIGHTS_FILE, Stored, check_inventory, inventory, read_weights

EMBEDDED = Path(__file__).parents[1] / "embedded"
SHARD_BYTES = 5 * 10**9  # most bytes of one weight file


def find_model(path: str) -> Path:
    """The folder of a model: `embedded`, a folder, or a hub id, which is downloaded."""
    if path == "embedded":
        return EMBEDDED
    folder = named_path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{path} is a file; a model is a folder with config.json and .safetensors files")
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"no model folder at {path}; name a folder, a hub id such as owner/name, or 'embedded'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as err:
        raise UserError(
            f"no folder is called {path}, and the hub gave no model by that name: {_first_line(err)}"
        ) from err


def read_config(folder: Path) -> DecoderConfig:
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} has no config.json, so it is not a model folder")
    hf = read_object(inside(folder, "config.json"))
    if hf.get("auto_map"):
        raise UserError(
            f"{folder} brings Python code of its own (auto_map in config.json), which Paceline does not run"
        )
    return DecoderConfig.from_hf(hf, where=str(folder))


def read_any_config(folder: Path) -> DecoderConfig | ForeignConfig:
    """The config of a model that the decoder runs, or of one of another family."""
    if not (folder / "config.json").exists():
        return read_config(folder)  # which says so
    hf = read_object(inside(folder, "config.json"))
    known = hf.get("model_type") in FAMILIES or hf.get("auto_map") or not isinstance(hf.get("model_type"), str)
    return read_config(folder) if known else foreign_config(hf, folder)


def load_model(path: str, dtype: str = "auto", device: str | torch.device = "cpu") -> Decoder:
    """A decoder with the weights at `path`, on `device`, in `dtype`."""
    folder = find_model(path)
    config = read_config(folder)
    device = torch.device(device)
    found = check_model(folder)
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to(as_dtype(dtype, device)).to_empty(device=device)
    if config.tied:
        model.head.weight = model.embed.weight
    _fill(model, found)
    return model.requires_grad_(False)


@torch.no_grad()
def _fill(model: Decoder, found: Mapping[str, Stored]) -> None:
    wanted = dict(layout(model))
    for name, value in read_weights(found, wanted, str(model.device)):
        wanted[name].copy_(value)


def check_model(folder: Path) -> dict[str, Stored]:
    """Refuse a model that could not be loaded, by its config and the headers of its files -> its tensors by name."""
    config = read_config(folder)
    found = inventory(folder)
    stored_count = sum(stored.count for stored in found.values())
    if config.parameters > stored_count and config.layers > len(found):  # the files do not even name so many layers
        raise UserError(
            f"the config.json of {folder} implies {config.parameters:,} weights, but its files hold {stored_count:,}; "
            "is the download complete, and the config its own?"
        )
    with torch.device("meta"):
        check_inventory(found, dict(layout(Decoder(config))), folder)
    return found


def save_model(model: Decoder, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json and one or more safetensors files. The tokenizer is saved apart."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(model.dtype).removeprefix("torch.")
    hf = model.config.hf | {"architectures": [FAMILIES[model.config.family].architecture], "dtype": dtype}
    hf.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    shards = _shards(model, shard_bytes)
    if len(shards) == 1:
        _write(shards[0], folder / WEIGHTS_FILE)
        return
    index: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write(shard, folder / name)
        index |= dict.fromkeys(shard, name)
    total = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2) + "\n")


def _write(tensors: dict[str, Tensor], file: Path) -> None:
    # Slices of a fused weight share its storage, which safetensors refuses: each gets a copy, one shard at a time.
    copies = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    save_file(copies, file, metadata={"format": "pt"})


def _shards(model: Decoder, limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in layout(model):
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += nbytes
    return shards


def layout(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of all weights; of fused tensors, the view that the name stands for."""
    yield "model.embed_tokens.weight", model.embed.weight
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}."
        own = dict(layer.named_parameters())
        yield at + "input_layernorm.weight", own["input_norm"]
        yield at + "post_attention_layernorm.weight", own["post_norm"]
        for name in ("q_norm", "k_norm"):
            if name in own:
                yield f"{at}self_attn.{name}.weight", own[name]
        for suffix, kind in (("", "weight"), ("_bias", "bias")):
            for fused, sizes in fused_parts(model.config).items():
                tensor = own.get(fused + suffix)
                if tensor is not None:
                    parts = tensor.split(list(sizes.values())) if len(sizes) > 1 else (tensor,)
                    yield from ((f"{at}{name}.{kind}", part) for name, part in zip(sizes, parts, strict=True))
    yield "model.norm.weight", model.norm
    if not model.config.tied:
        yield "lm_head.weight", model.head.weight


def fused_parts(c: DecoderConfig) -> dict[str, dict[str, int]]:
    """The matrices of a layer, and by their names in checkpoints the linear maps that each is made of, with how many
    rows."""
    query, key = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return {
        "qkv": {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key},
        "o": {"self_attn.o_proj": c.hidden_size},
        "gate_up": {"mlp.gate_proj": c.intermediate_size, "mlp.up_proj": c.intermediate_size},
        "down": {"mlp.down_proj": c.hidden_size},
    }


def _first_line(err: Exception) -> str:
    return shorten(str(err).strip().partition("\n")[0], 300)
