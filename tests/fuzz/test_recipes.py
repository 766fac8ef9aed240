"""Recipes and overrides that are damaged or absurd: a config whose numbers are finite, or one sentence."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import RECIPES, Config, load_config, setting_names
from paceline.errors import UserError

from .mutate import SCALARS, mutate_bytes, mutate_text, mutate_value, watchdog

NUMBERS = [
    "0", "1", "-1", "3.5", "1e-5", "1e400", ".inf", "-.inf", ".nan", "nan", "inf", "0x" + "f" * 5000, "1" * 400,
    "9" * 5000, "1:" * 3000 + "1", "0b1", "0o7", "1_000", "+1", "2**63", "9223372036854775808", "1e308", "5e-324", "1e",
]  # fmt: skip
VALUES = [
    *NUMBERS, "", "null", "~", "true", "off", "''", "[]", "{}", "['']", "[a", "{a: b: c}", "{1: 2}", "{[a]: b}",
    "{? a}", "2001-01-01", "2001-99-99", "2001-01-01 99:00:00", "!!binary x", "!!python/object:os.system {}",
    "!!int x", "!!set {a}", "!!float ''", "!!bool maybe", "!!timestamp x", "!!omap [a]", "!!pairs [a: 1]", "&a [*a]",
    "*a", "&a {b: *a}", "<<: 3", "{<<: [1]}", "[" * 200, "[" * 1000, "{a: " * 150, "'\\0'", '"\\0"', '"\\ud800"',
    '"\\U00110000"', "\udcff", "\x00", "\x07", "a\nb", "--- 1\n--- 2", "%YAML 9.9\n--- 1", "!", "| \n a",
    "!<tag:yaml.org,2002:str> 1", "[neural:5]", "[neural:0]", "[neural:99x99]", "[neural:" + "9" * 5000 + "]",
    "[plain, plain]", "[{function: math, weight: .nan}]", "[{function: ''}]", "[0.9, 0.999]", "[2, -1]", "[.nan, 0]",
    "{a: {b: .inf}}", "{a: 2001-01-01}", "x" * 20_000,
]  # fmt: skip
KEYS = [
    "", ".", "..", "a", "a.b", "rollout", "rollout.", ".rollout", "rollout.samples.x", "task.options.a.b", "<<", "é",
    "st\udcffeps", "a\nb", "\x00", "reward.functions.0.weight", "." * 500, "a." * 500, "__class__", "model_config",
    "x" * 50_000,
]  # fmt: skip
NAMES = [
    "default",
    "defualt",
    "",
    ".",
    "..",
    "/",
    ".yaml",
    "x.yaml",
    "\x00.yaml",
    "a" * 5000 + ".yaml",
    "\udcff.yaml",
    "é",
]


def odd_override(dice: random.Random) -> str:
    known = setting_names()
    key = dice.choice(known) if dice.random() < 0.85 else dice.choice(KEYS)
    if dice.random() < 0.1:
        key = mutate_text(dice, key)
    value = dice.choice(VALUES) if dice.random() < 0.7 else str(dice.choice(SCALARS[:12]))
    if dice.random() < 0.2:
        value = mutate_text(dice, value)
    return f"{key}={value}" if dice.random() < 0.98 else key + value


def odd_recipe(dice: random.Random, bases: list[bytes]) -> bytes:
    base = dice.choice(bases)
    kind = dice.randrange(4)
    if kind == 0:
        return mutate_bytes(dice, base)
    if kind == 1:
        return mutate_text(dice, base.decode()).encode("utf-8", "surrogatepass")
    if kind == 2:
        value = yaml.safe_load(base)
        for _ in range(dice.choice((1, 1, 3))):
            value = mutate_value(dice, value)
        return yaml.safe_dump(value).encode("utf-8", "surrogatepass")
    # By the grammar: sections with settings that exist, and values that should not.
    lines: dict[str, list[str]] = {}
    for name in dice.sample(setting_names(), dice.choice((1, 2, 6))):
        section, _, key = name.rpartition(".")
        lines.setdefault(section, []).append(f"{key}: {dice.choice(VALUES)}")
    text = ""
    for section, entries in lines.items():
        indent = "  " if section else ""
        text += f"{section}:\n" if section else ""
        text += "".join(f"{indent}{entry}\n" for entry in entries)
    return text.encode("utf-8", "surrogatepass")


def one_sentence(recipe: str | None, overrides: list[str]) -> bool:
    """Whether it is a config."""
    with watchdog():
        try:
            config = load_config(recipe, overrides)
        except UserError as err:
            said = str(err)
            assert said and "\n" not in said and "\r" not in said and len(said) < 2000, said[:3000]
            said.encode("utf-8", "backslashreplace")
            return False
    assert isinstance(config, Config)
    check_finite(config.model_dump(), recipe, overrides)
    # What a run directory keeps of it is the same config.
    assert Config.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    return True


def check_finite(value: Any, *where: Any) -> None:
    if isinstance(value, dict):
        for one in value.values():
            check_finite(one, *where)
    elif isinstance(value, list | tuple):
        for one in value:
            check_finite(one, *where)
    elif isinstance(value, float):
        assert math.isfinite(value), where


def fuzz(folder: Path, count: int, seed: int) -> tuple[int, int]:
    dice = random.Random(seed)
    bases = [file.read_bytes() for file in sorted(RECIPES.glob("*.yaml"))]
    bases.append(yaml.safe_dump(Config().model_dump(mode="json")).encode())
    file, empty = folder / "r.yaml", folder / "empty.yaml"
    empty.touch()
    good = 0
    for _ in range(count):
        recipe: str | None = None
        overrides = [odd_override(dice) for _ in range(dice.choice((1, 1, 2)))]
        if dice.random() < 0.5:
            file.write_bytes(odd_recipe(dice, bases))
            recipe = str(file)
            overrides = overrides if dice.random() < 0.2 else []
        elif dice.random() < 0.8:  # which is read faster than the default
            recipe = str(empty)
        elif dice.random() < 0.2:
            recipe = dice.choice(NAMES)
        good += one_sentence(recipe, overrides)
    return good, count - good


def test_odd_recipes(tmp_path):
    good, bad = fuzz(tmp_path, 400, seed=0)
    assert good > 20 and bad > 200, "a fuzzer that only ever sees one of both sees little"


@pytest.mark.soak
def test_many_odd_recipes(tmp_path):
    good, bad = fuzz(tmp_path, 20_000, seed=1)
    assert good > 1000 and bad > 10_000


def test_every_value_for_every_kind_of_setting(tmp_path):
    recipe = tmp_path / "empty.yaml"
    recipe.touch()
    names = ["seed", "rollout.temperature", "rollout.stop", "task.options", "task.system", "learn.betas", "model.path"]
    for name in [
        *names,
        "reward.functions",
        "speculation.strategies",
        "log.tensorboard",
        "rollout",
        "learn.lr_scheduler",
    ]:
        for value in VALUES:
            one_sentence(str(recipe), [f"{name}={value}"])
    for key in KEYS:
        one_sentence(str(recipe), [f"{key}=1"])
    for name in NAMES:
        one_sentence(name, [])


def test_what_is_not_a_recipe_file(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "circle.yaml").symlink_to("circle.yaml")
    (tmp_path / "nowhere.yaml").symlink_to("nothing")
    (tmp_path / "huge.yaml").write_bytes(b"#" * 10**6)
    (tmp_path / "device.yaml").symlink_to("/dev/zero")
    for name in ("folder", "pipe", "circle", "nowhere", "huge", "device"):
        assert not one_sentence(str(tmp_path / f"{name}.yaml"), [])
