"""From recipes, overrides and Python settings to a validated `Config`."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.config.describe import explain
from paceline.config.renamed import current_name, rename
from paceline.config.schema import Config
from paceline.errors import UserError
from paceline.files import reading

COMMAND_LINE = "the command line"
RECIPES = Path(__file__).parents[1] / "recipes"
DEFAULT_RECIPE = "default"
DEMO = {"model.path": "embedded", "task.name": "countdown"}
"""What the default recipe is made for."""
RECIPE_BYTES = 256 * 2**10
"""Of a recipe: the largest that anybody would write, and the YAML parser takes a second for it."""
MAX_PARTS = 20
"""Of a dotted key."""


def load_config(recipe: str | None = None, overrides: list[str] | None = None) -> Config:
    """Read a recipe (a file, or the name of one that ships with Paceline), apply overrides, validate. Without a recipe
    it is `default` for the embedded model on Countdown, and none for anything else."""
    name = choose_recipe(recipe, overrides)
    path = _find_recipe(name) if name else None
    values = read_settings(path) if path else {}
    given = read_overrides(overrides or [])
    overridden = {_put(values, key, value, COMMAND_LINE) for key, value in given}
    return build_config(values, where=str(path or "the settings"), overridden=overridden)


def read_overrides(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """`key.sub=value` from the command line: keys as they were typed, and values as YAML reads them."""
    pairs = []
    for text in overrides:
        key, eq, raw = text.partition("=")
        if not eq or not key:
            shown = reading.shorten(text)
            raise UserError(f"'{shown}' is not an override: write it as key.sub=value, for example rollout.samples=4")
        where = f"the value of '{reading.shorten(key)}' on {COMMAND_LINE}"
        value = reading.parse_yaml(raw, where)
        _check_keys(value, where)
        pairs.append((key, value))
    return pairs


def change_settings(config: Config, settings: Iterable[tuple[str, Any]], where: str) -> tuple[Config, set[str]]:
    """A config with some settings changed one by one -> it, and their present names."""
    values = config.model_dump(mode="json")
    changed = set()
    for key, value in settings:
        if isinstance(value, dict) and key in Config.model_fields:
            raise UserError(f"'{key}' in {where} is a section; change its settings one by one, as {key}.NAME=value")
        changed.add(_put(values, key, value, where))
    return build_config(values, where, changed if where == COMMAND_LINE else None), changed


def choose_recipe(recipe: str | None = None, overrides: list[str] | None = None) -> str | None:
    """The recipe that settings build on. The default one is made for the embedded model on Countdown: its learning rate
    and its penalty on long completions would spoil anything else, which gets the neutral defaults of the schema."""
    if recipe:
        return recipe
    named = {"model.path": DEMO["model.path"], "task.name": DEMO["task.name"]}
    for key, value in read_overrides([text for text in overrides or [] if text.startswith(("model", "task"))]):
        section, _, rest = key.partition(".")
        inside = {rest: value} if rest else value if isinstance(value, dict) else {}
        named |= {f"{section}.{k}": v for k, v in inside.items() if f"{section}.{k}" in named}
    return demo_recipe(named["model.path"], named["task.name"])


def demo_recipe(model: Any, task: Any) -> str | None:
    """The recipe of the embedded model on its own task; none for anything else."""
    return DEFAULT_RECIPE if {"model.path": model, "task.name": task} == DEMO else None


def describe_recipe(recipe: str | None = None, overrides: list[str] | None = None) -> str:
    """The line on the terminal at the start."""
    name = choose_recipe(recipe, overrides)
    if name is None:
        return "settings: the defaults, no recipe"
    about = " (the embedded reasoner on Countdown)" if name == DEFAULT_RECIPE else ""
    return f"settings: the recipe {name}{about}"


def build_config(values: dict[str, Any], where: str, overridden: set[str] | None = None) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as err:
        raise UserError(explain(err, where, overridden or set())) from err


def config_from(settings: Mapping[str, Any], where: str, recipe: str | None = None) -> Config:
    """A config from settings by their dotted names, on top of a recipe if one is named."""
    values = read_settings(_find_recipe(recipe)) if recipe else {}
    for key, value in settings.items():
        if not isinstance(key, str):
            raise UserError(f"{where} sets {reading.shorten(repr(key))}, which is not the name of a setting")
        _put(values, key, value, where)
    return build_config(values, where)


def _find_recipe(recipe: str) -> Path:
    path = Path(recipe)
    shown = reading.shorten(recipe, 200)
    if path.suffix in (".yaml", ".yml"):
        if not os.path.exists(path):  # which says no, instead of raising, of names that no file can have
            raise UserError(f"no recipe at {shown}; name a .yaml file or one of: {', '.join(recipe_names())}")
        return path
    if recipe not in recipe_names():
        close = difflib.get_close_matches(recipe, recipe_names(), n=1)
        hint = f"; did you mean '{close[0]}'?" if close else f"; there are: {', '.join(recipe_names())}"
        raise UserError(f"no recipe is called '{shown}'{hint}")
    return RECIPES / f"{recipe}.yaml"


def recipe_names() -> list[str]:
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


@dataclass(frozen=True)
class Recipe:
    """One that ships with Paceline, as the comment says that it begins with."""

    name: str
    about: str
    needs: str
    """Which card, and what is downloaded."""


def read_recipes() -> list[Recipe]:
    return [_describe(RECIPES / f"{name}.yaml") for name in recipe_names()]


def _describe(path: Path) -> Recipe:
    """The comment at the top: sentences, then one that begins with `needs:`."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    about, _, needs = " ".join(line.lstrip("# ") for line in lines).partition("needs:")
    return Recipe(path.stem, about.strip(), needs.strip())


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file by their present names, not validated yet."""
    values = reading.read_yaml(path, RECIPE_BYTES)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold settings as 'key: value', but holds a {type(values).__name__}")
    _check_keys(values, str(path))
    return rename(values, str(path))


def _check_keys(value: Any, where: str) -> None:
    for key in value if isinstance(value, dict) else ():
        if not isinstance(key, str):
            raise UserError(f"the key {reading.shorten(repr(key))} in {where} is not text; put it in quotes")
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_keys(one, where)


def _put(values: dict[str, Any], key: str, value: Any, where: str) -> str:
    """Set one setting, or a section -> its present name."""
    *path, last = key.split(".")
    shown = reading.shorten(key)
    if not all(part.isprintable() and part for part in (*path, last)):
        raise UserError(f"'{shown}' is not the name of a setting; `paceline settings` lists them all")
    if len(path) >= MAX_PARTS:
        raise UserError(f"'{shown}' cannot be set: no setting has a name of {len(path) + 1} parts")
    key = current_name(key, where)
    last = key.rpartition(".")[2]
    for part in path:
        if values.get(part) is None:  # a section without entries is empty
            values[part] = {}
        values = values[part]
        if not isinstance(values, dict):
            raise UserError(f"'{shown}' cannot be set: '{reading.shorten(part)}' is a value, not a section")
    values[last] = rename(value, where, key)
    return key


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted key."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
