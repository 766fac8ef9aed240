"""The files of a tokenizer, checked before the library that reads them sees any.

That library opens whatever its settings name, waits for pipes, follows links, and would run Python code that comes with
a model if it were asked to. All of that is refused here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from paceline.errors import UserError
from paceline.files.reading import check, inside, open_file, read_object, shorten

SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".jsonl", ".py", ".gguf")
"""Endings of the files that the tokenizer library may open."""
TEMPLATES_FOLDER = "additional_chat_templates"
MAX_TOKENIZER_BYTES = 256 * 2**20
"""Of one file; the largest in use have some tens of megabytes."""
STALE_SETTINGS = ("special_tokens_map_file", "tokenizer_file", "added_tokens_file")
"""Paths on the machine where a tokenizer was made: written by old versions, and not followed."""
SPECIAL_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")


TokenId = Annotated[int, Field(ge=0, lt=2**24)]
"""A number, or a string of one: keys of JSON are strings. Bounded, since some tables are filled up to the highest."""


class NamedTemplate(BaseModel):
    name: str
    template: str


def check_tokenizer_files(folder: Path) -> None:
    """Refuse a folder whose tokenizer would read from elsewhere, wait, or run code."""
    for file in sorted(folder.iterdir()):
        if file.name.endswith(SUFFIXES):
            _check_file(inside(folder, file.name))
    if os.path.lexists(folder / TEMPLATES_FOLDER):
        templates = inside(folder, TEMPLATES_FOLDER)
        for file in sorted(templates.iterdir()) if templates.is_dir() else []:
            _check_file(inside(templates, file.name))
    _check_settings(folder)
    _check_special_tokens(folder)
    added = folder / "added_tokens.json"
    if added.exists():
        check(dict[str, TokenId], read_object(added, MAX_TOKENIZER_BYTES), str(added))


def own_files(folder: Path) -> dict[str, str]:
    """Arguments that name the folder's own tokenizer.json where tokenizer_config.json has a stale path, which
    earlier versions of transformers 5 follow."""
    stale = (folder / "tokenizer_config.json").exists() and read_object(
        inside(folder, "tokenizer_config.json"), MAX_TOKENIZER_BYTES
    ).get("tokenizer_file")
    if not stale or not (folder / "tokenizer.json").exists():
        return {}
    return {"tokenizer_file": str(inside(folder, "tokenizer.json"))}


def _check_file(file: Path) -> None:
    if not file.exists():
        raise UserError(f"{file} is a link to nothing; put the file itself there")
    descriptor = open_file(file)
    size = os.fstat(descriptor).st_size
    os.close(descriptor)
    if size > MAX_TOKENIZER_BYTES and file.suffix != ".gguf":
        raise UserError(
            f"{file} is larger than {MAX_TOKENIZER_BYTES:,} bytes, which is more than Paceline reads of such a file"
        )


def _check_settings(folder: Path) -> None:
    """tokenizer_config.json, whose values become arguments of the tokenizer."""
    for name in ("tokenizer_config.json", "config.json"):
        if not (folder / name).exists():
            continue
        file = inside(folder, name)
        settings = read_object(file, MAX_TOKENIZER_BYTES)
        if settings.get("auto_map"):
            raise UserError(f"{folder} brings Python code of its own (auto_map in {name}), which Paceline does not run")
        check(str | None, settings.get("tokenizer_class"), f"{file} (tokenizer_class)")  # type: ignore[arg-type]
        if name == "config.json":
            if settings.get("configuration_files"):
                raise UserError(
                    f"{file} names other files to be read in its place (configuration_files); use one of them"
                )
            continue
        for key, value in settings.items():
            if value and (key in ("init_inputs", "gguf_file", "trust_remote_code") or _names_file(key, value)):
                raise UserError(f"'{shorten(key)}' in {file} would have another file read or code run; remove it")
        _check_templates(settings.get("chat_template"), file)
        check(dict[TokenId, Any], settings.get("added_tokens_decoder") or {}, f"{file} (added_tokens_decoder)")
        versions = settings.get("fast_tokenizer_files") or []
        for one in check(list[str], versions, f"{file} (fast_tokenizer_files)"):
            inside(folder, one)


def _check_templates(templates: Any, file: Path) -> None:
    """One template, or several with names, which become names of files when the tokenizer is saved."""
    if templates is None or isinstance(templates, str):
        return
    if isinstance(templates, list):
        several = check(list[NamedTemplate], templates, f"{file} (chat_template)")
        templates = {one.name: one.template for one in several}
    for name in check(dict[str, str], templates, f"{file} (chat_template)"):
        inside(file.parent, f"{name}.jinja")


def _names_file(key: str, value: Any) -> bool:
    if not isinstance(value, str) or key in STALE_SETTINGS:
        return False
    return key.endswith("_file") or key in ("vocab", "merges", "tokenizer_object")


def _check_special_tokens(folder: Path) -> None:
    """Its keys become arguments too, after those of tokenizer_config.json."""
    if not (folder / "special_tokens_map.json").exists():
        return
    file = inside(folder, "special_tokens_map.json")
    for key, value in read_object(file, MAX_TOKENIZER_BYTES).items():
        if not (key.endswith("_token") or key in SPECIAL_TOKEN_LISTS) or not isinstance(
            value, str | dict | list | None
        ):
            raise UserError(f"'{shorten(key)}' in {file} is not a special token")
