"""`paceline export --adapter`: the adapters of a run as PEFT and serving engines load them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.files.reading import inside, read_object
from paceline.integrations.export_card import adapter_card
from paceline.integrations.export_folder import whole_folder
from paceline.integrations.export_source import Source, find_source
from paceline.lora.files import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config, read_lora_shape
from paceline.model.checkpoint import EMBEDDED
from paceline.model.tokenizer import load_tokenizer


def export_adapter(what: str, out: Path, base: str | None = None) -> dict[str, Any]:
    """Write the adapters of a run with the tokenizer; `base` is what PEFT will load them onto, by default the model
    that training began with."""
    source = find_source(what)
    if not (source.policy / ADAPTER).is_dir():
        raise UserError(
            f"{what} has no adapter, since all of its weights were trained (learn.lora.rank); export them with --policy"
        )
    folder = inside(source.policy, ADAPTER)
    shape = read_lora_shape(folder)
    name = base or _base(source, folder)
    with whole_folder(out) as aside:
        (aside / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(shape, name), indent=2) + "\n")
        shutil.copyfile(inside(folder, ADAPTER_WEIGHTS), aside / ADAPTER_WEIGHTS)
        load_tokenizer(str(source.policy)).save(aside)
        (aside / "README.md").write_text(adapter_card(source, shape, name, out.resolve().name), encoding="utf-8")
    return {"out": str(out), "format": "adapter", "base": name, "rank": shape.rank, "step": source.step}


def _base(source: Source, folder: Path) -> str:
    """The model that a run began with: a hub id as it was given, a folder by its whole path."""
    if source.config is None:
        return str(read_object(inside(folder, ADAPTER_CONFIG)).get("base_model_name_or_path") or "")
    path = source.config.model.path
    if path == "embedded":
        return str(EMBEDDED)
    return str(Path(path).resolve()) if Path(path).is_dir() else path
