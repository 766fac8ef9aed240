"""The list of all settings, and one sentence for what is wrong with one."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError

from paceline.config.foreign import FOREIGN, as_setting, translate
from paceline.config.kinds import kinds
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
            default = field.get_default(call_default_factory=True, validated_data={})
            text = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
            rows.append((prefix + name, text, " ".join((field.description or "").split())))
    return rows


def setting_names() -> list[str]:
    """All dotted keys of the schema, in order."""
    return [name for name, _, _ in describe_settings()]


@dataclass(frozen=True)
class SettingText:
    """A setting as `paceline settings` shows it."""

    name: str
    type: str
    default: str
    description: str
    elsewhere: tuple[str, ...]
    """What other libraries call it."""

    def mentions(self, word: str) -> bool:
        texts = (self.name, self.description, self.type, *self.elsewhere)
        return any(word.lower() in text.lower() for text in texts)


def find_settings(word: str = "") -> list[SettingText]:
    """Those whose name, description, choices or name elsewhere have the word in them; all without one."""
    types = kinds(Config.model_json_schema())
    theirs: dict[str, list[str]] = {}
    for one in FOREIGN:
        theirs.setdefault(as_setting(one), []).append(f"{one.library}: {one.name}")
    every = [
        SettingText(name, types[name].replace("`", ""), default, text.replace("`", ""), tuple(theirs.get(name, ())))
        for name, default, text in describe_settings()
    ]
    return [one for one in every if one.mentions(word)]


def explain(err: ValidationError, where: str, overridden: set[str]) -> str:
    """One sentence for the first problem, in the user's own terms."""
    first = err.errors(include_url=False, include_context=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    typed = any(o == key or o.startswith(f"{key}.") or key.startswith(f"{o}.") for o in overridden)
    key = reading.shorten(key) or "the settings"
    source = "on the command line" if typed else f"in {where}"
    if first["type"] == "extra_forbidden":
        return f"unknown setting '{key}' {source}{_did_you_mean(_whole(key, first['input']))}"
    message = first["msg"].removeprefix("Value error, ")
    message = re.sub(r"^[A-Z]\w+ should", "it should", message)
    given = "" if first["type"] == "value_error" else f" = {reading.shorten(repr(first['input']))}"
    return f"'{key}'{given} {source} does not work: {message}"


def _whole(key: str, value: object) -> str:
    """The name of what was set, where only its section is unknown: the first setting in that."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def did_you_mean(key: str) -> str | None:
    """The setting that was meant: the same name in another section, or else the nearest spelling."""
    known = setting_names()
    sections = sorted({k.rpartition(".")[0] for k in known} - {""})
    close = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    close = close or difflib.get_close_matches(key, known + sections, n=1, cutoff=0.5)
    return close[0] if close else None


def _did_you_mean(key: str) -> str:
    if meant := translate(key):
        return f"; {meant}"
    close = did_you_mean(key)
    return f"; did you mean '{close}'?" if close else "; `paceline settings WORD` finds one"
