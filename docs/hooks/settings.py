"""The settings page: every setting with its type, default and description, from the schema itself."""

from __future__ import annotations

import json
from typing import Any

from paceline.config import Config
from paceline.config.kinds import follow, kind

MARK = "<!-- every setting -->"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri != "settings.md":
        return markdown
    if MARK not in markdown:
        raise ValueError(f"docs/settings.md has lost the place for the settings: {MARK}")
    return markdown.replace(MARK, render())


def render() -> str:
    """A table for the settings that stand alone, then a heading and a table for each section."""
    schema = Config.model_json_schema()
    sections = {k: p for k, p in schema["properties"].items() if "$ref" in p}
    single = {k: p for k, p in schema["properties"].items() if k not in sections}
    parts = [_table(schema, single, "")]
    for name, field in sections.items():
        parts += [f"## {name}", field["description"], _table(schema, follow(schema, field)["properties"], f"{name}.")]
    return "\n\n".join(parts)


def _table(schema: dict, fields: dict[str, dict], prefix: str) -> str:
    return "\n".join(["| setting | default | |", "|---|---|---|", *_rows(schema, fields, prefix)])


def _rows(schema: dict, fields: dict[str, dict], prefix: str) -> list[str]:
    rows = []
    for name, field in fields.items():
        key = prefix + name
        if "$ref" in field:  # a section within the section
            rows += _rows(schema, follow(schema, field)["properties"], f"{key}.")
            continue
        default = f"`{_default(field)}`" if "default" in field else "must be given" if "[]" in key else _empty(field)
        text = " ".join(field["description"].split()).replace("|", "\\|")
        rows.append(f"| `{key}`{{: #{key.replace('[]', '')} }} | {default} | {text}<br>*{kind(field)}* |")
        if "$ref" in field.get("items", {}):  # a list of sections: what each of its items has
            rows += _rows(schema, follow(schema, field["items"])["properties"], f"{key}[].")
    return rows


def _default(field: dict) -> str:
    value = field["default"]
    return value if isinstance(value, str) else json.dumps(value)


def _empty(field: dict) -> str:
    return "`[]`" if field["type"] == "array" else "`{}`"
