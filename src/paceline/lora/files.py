"""Adapters in PEFT's form: a folder with adapter_config.json and adapter_model.safetensors.

What PEFT's form can say and Paceline does not compute (DoRA, other modules that were trained, ranks that differ) is
refused by name rather than run wrongly.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import Tensor

from paceline.config.training import MAX_RANK, TARGETS
from paceline.errors import UserError
from paceline.files.reading import check, inside, named_path, read_object, read_tensors, shorten
from paceline.lora.shape import LoraShape
from paceline.model.checkpoint import find_model
from paceline.model.weights import open_weights

if TYPE_CHECKING:
    from paceline.lora.adapters import Lora

ADAPTER = "adapter"  # folder in a checkpoint that holds the adapters
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
TENSOR = re.compile(r"model\.layers\.[0-9]{1,6}\.(?:self_attn|mlp)\.(\w+)\.lora_[AB]\.weight")
CHANGED_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Ways to begin that take something out of the base's weights, so that the adapter goes with no other."""
NOT_COMPUTED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)


class PeftConfig(BaseModel):
    """What is read of adapter_config.json."""

    model_config = ConfigDict(extra="allow")

    peft_type: str
    r: int = Field(ge=1, le=MAX_RANK)
    lora_alpha: float = Field(gt=0)
    bias: str = "none"
    use_rslora: bool = False
    init_lora_weights: bool | str | None = True


def find_adapter(path: str) -> Path:
    """The folder of an adapter: a folder, or a hub id, which is downloaded."""
    folder = named_path(path)
    if not folder.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise UserError(f"no adapter folder at {path}; name one with {ADAPTER_CONFIG}, or a hub id such as owner/name")
    return folder if folder.is_dir() else find_model(path)


def read_lora_shape(folder: Path) -> LoraShape:
    """Rank, alpha and targets of an adapter, or a sentence that says why it cannot be used."""
    if not (folder / ADAPTER_CONFIG).exists():
        raise UserError(f"{folder} has no {ADAPTER_CONFIG}, so it is not the folder of an adapter")
    file = inside(folder, ADAPTER_CONFIG)
    config = check(PeftConfig, read_object(file), str(file))
    if config.peft_type != "LORA":
        raise UserError(f"{file} describes an adapter of type {shorten(config.peft_type)}; Paceline trains LoRA")
    for name in NOT_COMPUTED:
        if (config.model_extra or {}).get(name):
            raise UserError(f"{file} sets {name}, which Paceline does not compute; use a plain LoRA adapter")
    if config.bias != "none":
        raise UserError(f"{file} has bias = {shorten(config.bias)}, but Paceline trains no biases with LoRA")
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights.lower().startswith(CHANGED_BASE):
        raise UserError(
            f"{file} began with init_lora_weights = {shorten(config.init_lora_weights)}, which changes the base; "
            "convert it to a plain LoRA adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion)"
        )
    # alpha / sqrt(rank), in the form that is scaled by alpha / rank
    alpha = config.lora_alpha * (config.r**0.5 if config.use_rslora else 1.0)
    return LoraShape(config.r, alpha, _targets(_weights_file(folder)))


def _weights_file(folder: Path) -> Path:
    if not (folder / ADAPTER_WEIGHTS).exists():
        raise UserError(f"{folder} has no {ADAPTER_WEIGHTS}; save the adapter with safetensors")
    return inside(folder, ADAPTER_WEIGHTS)


def _targets(file: Path) -> tuple[str, ...]:
    """Linear maps that a file has adapters of."""
    found = set()
    with open_weights(file) as opened:
        for name in opened.keys():  # noqa: SIM118 (not a dict: only keys() iterates)
            match = TENSOR.fullmatch(name.removeprefix(PREFIX))
            if match is None or match[1] not in TARGETS:
                raise UserError(
                    f"{file} holds the tensor {shorten(name)}; Paceline has adapters of {', '.join(TARGETS)} only"
                )
            found.add(match[1])
    if not found:
        raise UserError(f"{file} holds no tensors")
    return tuple(name for name in TARGETS if name in found)


def read_adapter(folder: Path, lora: Lora) -> dict[str, Tensor]:
    """The adapter's tensors by the names of `lora.parameters`, each of the right shape."""
    file = _weights_file(folder)
    tensors = {name.removeprefix(PREFIX): t for name, t in read_tensors(file, str(lora.model.device)).items()}
    for name, parameter in lora.parameters.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise UserError(f"{file} has no tensor {PREFIX}{name}: it was made for another model or other targets")
        if tensor.shape != parameter.shape or not tensor.is_floating_point():
            raise UserError(
                f"tensor {PREFIX}{name} of {file} has shape {list(tensor.shape)}, "
                f"but the model and learn.lora need {list(parameter.shape)}"
            )
    if unknown := sorted(set(tensors) - set(lora.parameters)):
        raise UserError(f"{file} holds the tensor {shorten(unknown[0])}, which the model has no place for")
    return tensors


def read_base_digest(folder: Path) -> str | None:
    """Of the base that an adapter was trained on, as `base.digest` has it; None if the file does not say."""
    with open_weights(_weights_file(folder)) as opened:
        metadata: dict[str, str] = opened.metadata() or {}
        return metadata.get("base")


def save_adapter(lora: Lora, folder: Path, base: str) -> None:
    """Write the adapters as they are; `base` is what PEFT will load them onto."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(lora.shape, base), indent=2) + "\n")
    tensors = {PREFIX + name: p.detach().cpu().contiguous() for name, p in lora.parameters.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt", "base": lora.base.digest})


def adapter_config(shape: LoraShape, base: str) -> dict[str, Any]:
    alpha = int(shape.alpha) if shape.alpha == int(shape.alpha) else shape.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": shape.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(shape.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
