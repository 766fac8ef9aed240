"""The list of all settings, and one sentence for what is wrong with one."""

from __future__ import annotations

import difflib
import re

from pydantic import BaseModel, ValidationError

from paceline.config.schema import Config
from paceline.config.values import Section
from paceline.files import reading


def describe_settings(model: type[BaseModel] = Config, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, description) of every setting, in order."""
    rows = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            rows += describe_settings(kind, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            text = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
            rows.append((prefix + name, text, " ".join((field.description or "").split())))
    return rows


def setting_names() -> list[str]:
    """All dotted keys of the schema, in order."""
    return [name for name, _, _ in describe_settings()]


def explain(err: ValidationError, where: str, overridden: set[str]) -> str:
    """One sentence for the first problem, in the user's own terms."""
    first = err.errors(include_url=False, include_context=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    typed = any(o == key or o.startswith(f"{key}.") or key.startswith(f"{o}.") for o in overridden)
    key = reading.shorten(key) or "the settings"
    source = "on the command line" if typed else f"in {where}"
    if first["type"] == "extra_forbidden":
        return f"unknown setting '{key}' {source}{_did_you_mean(key)}"
    message = first["msg"].removeprefix("Value error, ")
    message = re.sub(r"^[A-Z]\w+ should", "it should", message)
    given = "" if first["type"] == "value_error" else f" = {reading.shorten(repr(first['input']))}"
    return f"'{key}'{given} {source} does not work: {message}"


def _did_you_mean(key: str) -> str:
    """The same name in another section, or else the nearest spelling."""
    known = setting_names()
    sections = sorted({k.rpartition(".")[0] for k in known} - {""})
    close = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    close = close or difflib.get_close_matches(key, known + sections, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else "; `paceline settings` lists them all"
