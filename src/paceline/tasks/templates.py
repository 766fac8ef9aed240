"""Prompts made from columns: {question} stands for a column, {extra_info.level} for an entry of it.

Only names in braces are replaced, so that "put the answer into \\boxed{}" needs no care; {{ and }} are single braces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.tasks.rows import kind_of, refuse_column

PART = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.-]*)\}")


class Template:
    def __init__(self, text: str, setting: str):
        """`setting` is where it was given, for messages."""
        self.text = text
        self.setting = setting
        self.names = [match[1] for match in PART.finditer(text) if match[1]]
        if not self.names:
            raise UserError(
                f"{setting} = {shorten(repr(text))} names no column in braces, so that it would be the same for every "
                "row; write it like 'Question: {question}'"
            )

    def fill(self, row: Mapping[str, Any], where: str) -> str:
        """The text for a row; `where` says which row it is."""
        return PART.sub(lambda match: self._value(match, row, where), self.text)

    def _value(self, match: re.Match[str], row: Mapping[str, Any], where: str) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        value = find_entry(row, name, where, self.setting)
        if value is None:
            raise UserError(f"'{name}' of {where}, which {self.setting} asks for, is null")
        if isinstance(value, str):
            return value
        if isinstance(value, bool | int | float):
            return json.dumps(value)
        raise UserError(f"'{name}' of {where}, which {self.setting} asks for, is {kind_of(value)}, not text")


def find_entry(row: Mapping[str, Any], name: str, where: str, setting: str) -> Any:
    """A column, or an entry of it by its path with dots."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            refuse_column(name, setting, row, where)
        value = value[part]
    return value


def column_of(name: str) -> str:
    """The column that a path with dots begins with."""
    return name.partition(".")[0]
