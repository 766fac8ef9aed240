"""The ranges in pyproject.toml are those whose ends `make test-ranges` runs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RANGES = ROOT / "tests/ranges"
TESTED_EXTRAS = ("ray", "trl", "math", "gym", "hub")


def pins(name: str) -> dict[str, Version]:
    lines = (RANGES / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {package: Version(version) for package, version in pairs}


def required() -> dict[str, Requirement]:
    extras = PROJECT["optional-dependencies"]
    every = [*PROJECT["dependencies"], *(one for extra in TESTED_EXTRAS for one in extras[extra])]
    every += [one for one in extras["test"] if one.startswith("peft")]
    return {requirement.name: requirement for requirement in map(Requirement, every)}


def bound(requirement: Requirement, operator: str) -> Version:
    return next(Version(one.version) for one in requirement.specifier if one.operator == operator)


@pytest.mark.parametrize("name", required())
def test_the_low_end_is_tested(name):
    low = pins("low.txt") | pins("low-trl.txt")
    lowest = bound(required()[name], ">=")
    assert low[name].release[: len(lowest.release)] == lowest.release
    assert all(part == 0 for part in low[name].release[len(lowest.release) :])


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_the_high_end_is_tested(name):
    high = pins("high.txt")[name]
    assert high in required()[name].specifier
    assert bound(required()[name], "<") == Version(f"{high.major}.{high.minor + 1}")


def test_what_make_installs_by_default_lies_within():
    pinned = Version((ROOT / "constraints.txt").read_text().split("torch==")[1].split()[0])
    assert pinned in required()["torch"].specifier


@pytest.mark.parametrize("name", ["low.txt", "low-trl.txt", "high.txt"])
def test_make_uses_these_files(name):
    assert f"tests/ranges/{name}" in (ROOT / "Makefile").read_text()
