"""The types of settings in words, from the schema: for the docs and for `paceline settings`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MISTAKE = 10**6
"""Bounds from here on only stop slips of the pen, and would hide what matters."""


def kind(field: dict[str, Any]) -> str:
    """The type of a field of the JSON schema."""
    if "anyOf" in field:
        return " or ".join(kind(one) for one in field["anyOf"])
    if "enum" in field:
        return "one of " + ", ".join(f"`{value}`" for value in field["enum"])
    if "prefixItems" in field:
        return f"list of {len(field['prefixItems'])} numbers"
    if field["type"] == "array":
        return "list of texts" if field["items"].get("type") == "string" else "list"
    words = {"integer": "whole number", "string": "text", "boolean": "`true` or `false`", "null": "`null`"}
    words |= {"object": "settings of its own"}
    return words.get(field["type"], field["type"]) + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    if field.get("maximum", 0) >= MISTAKE:
        field = {key: value for key, value in field.items() if key != "maximum"}
    said = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    return "".join(f" {word} {_number(field[key])}" for key, word in said.items() if key in field)


def _number(value: float) -> str:
    power = value.bit_length() - 1 if isinstance(value, int) else 0
    return f"2^{power}" if power > 20 and value == 2**power else f"{value:g}"


def follow(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    """The section that a field refers to."""
    section: dict[str, Any] = schema["$defs"][field["$ref"].rpartition("/")[2]]
    return section


def kinds(schema: dict[str, Any]) -> dict[str, str]:
    """The type of every setting of a schema, by its dotted key."""
    return dict(_kinds(schema, schema["properties"], ""))


def _kinds(schema: dict[str, Any], fields: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in fields.items():
        if "$ref" in field:
            yield from _kinds(schema, follow(schema, field)["properties"], f"{prefix}{name}.")
        else:
            yield prefix + name, kind(field)
