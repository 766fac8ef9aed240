"""The house stays in order: who may import whom, one meaning per name, files and classes of a size to be read."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent
PRIVATE = {
    "guessable", "crowd", "pace", "lesson", "teach", "teaches", "twin", "prospect", "companion", "keeper", "spell",
    "settle", "mend", "member", "members", "room", "rooms", "way", "ways", "desk", "books", "circle",
}  # fmt: skip
"""Words that names had before; the field's are in docs/glossary.md."""
TOP = {"__init__", "__main__", "cli", "core", "errors", "loop", "version"}
LONGEST_CHAIN = 14  # modules
MOST_ATTRIBUTES = 15
MOST_LINES = {
    "loop.py": 260,
    "rollout/engine.py": 260,
    "cluster/worker.py": 260,
    "cluster/cluster.py": 260,
    "setup/memory.py": 260,
}
# Rooms and what each must not import: the arrows of the house point one way.
FORBIDDEN = {
    "core": {"*"},
    "kernels": {"model", "lora", "draft", "rollout", "spot", "learn", "cluster", "tasks", "observe", "report"},
    "model": {"lora", "draft", "rollout", "spot", "learn", "cluster", "tasks", "observe", "report", "evaluation"},
    "lora": {"draft", "rollout", "spot", "learn", "cluster", "tasks", "observe", "report", "evaluation"},
    "draft": {"rollout", "spot", "learn", "cluster", "tasks", "observe", "report"},
    "rollout": {"spot", "learn", "cluster", "tasks", "report", "evaluation"},
    "spot": {"cluster", "tasks", "observe", "report"},
    "learn": {"rollout", "spot", "cluster", "tasks", "observe", "report"},
    "tasks": {"model", "draft", "rollout", "spot", "learn", "cluster", "observe", "report"},
    "cluster": {"tasks", "report", "evaluation"},
    "evaluation": {"draft", "spot", "learn", "kernels", "report"},
    "observe": {"cluster", "learn", "spot", "report", "evaluation"},
    "report": {"cluster", "learn", "spot", "rollout", "draft"},
    "simulate": {"model", "kernels", "rollout", "spot", "learn", "tasks", "draft", "loop"},
}


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") or "__init__"


@cache
def trees() -> dict[str, ast.Module]:
    return {name_of(file): ast.parse(file.read_text()) for file in sorted(ROOT.rglob("*.py"))}


def imports(name: str, anywhere: bool) -> set[str]:
    """Modules of the package that a module imports: at its top, or `anywhere`, but for types only."""
    tree = trees()[name]
    hidden = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    found = set()
    for node in ast.walk(tree) if anywhere else tree.body:
        if id(node) in hidden:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "paceline":
            module = node.module.removeprefix("paceline").lstrip(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}".lstrip(".")
                found.add(inner if inner in trees() else module or "__init__")
    return found - {name}


def test_few_files_at_the_top():
    assert {name for name in trees() if "." not in name and (ROOT / f"{name}.py").exists()} == TOP


def test_rooms_import_only_what_they_may():
    wrong = []
    for name in trees():
        room = name.split(".")[0]
        for other in imports(name, anywhere=True):
            forbidden = FORBIDDEN.get(room, set())
            if other.split(".")[0] in forbidden or ("*" in forbidden and other != "__init__"):
                wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_cycle_and_no_long_chain_of_imports():
    @cache
    def chain(name: str, above: tuple[str, ...] = ()) -> tuple[str, ...]:
        assert name not in above, f"a cycle: {' -> '.join((*above, name))}"
        return (name, *max((longest(other) for other in imports(name, anywhere=False)), key=len, default=()))

    @cache
    def longest(name: str) -> tuple[str, ...]:
        return chain(name)

    found = max((longest(name) for name in trees()), key=len)
    assert len(found) <= LONGEST_CHAIN, " -> ".join(found)


def test_a_class_name_has_one_meaning():
    homes = defaultdict(list)
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def names_made_in(tree: ast.Module) -> set[str]:
    """Of classes, functions, parameters, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def test_names_are_the_words_of_the_field():
    private = defaultdict(set)
    for module, tree in trees().items():
        for name in names_made_in(tree):
            words = {word.lower() for part in name.split("_") for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", part)}
            if words & PRIVATE:
                private[module].add(name)
    assert not private


def test_a_constant_has_one_meaning():
    """The same number under the same name may stand in two modules; different ones may not."""
    values = defaultdict(dict)
    for name, tree in trees().items():
        for node in tree.body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, int | float)
            ):
                for target in node.targets:
                    if isinstance(target, ast.Name) and target.id.isupper():
                        values[target.id][name] = node.value.value
    assert not {name: where for name, where in values.items() if len(set(where.values())) > 1}


def test_no_class_does_everything():
    large = {}
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or any(
                "BaseModel" in ast.unparse(b) or "Section" in ast.unparse(b) for b in node.bases
            ):
                continue
            set_here = {
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and ast.unparse(part.value) == "self"
            }
            if len(set_here) > MOST_ATTRIBUTES:
                large[f"{name}.{node.name}"] = len(set_here)
    assert not large


def test_the_rooms_that_everybody_reads_are_short():
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in MOST_LINES}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES[name]}


def test_the_life_of_a_step_has_at_most_twelve_stations_and_its_files_exist():
    page = (ROOT.parents[1] / "docs" / "life-of-a-step.md").read_text()
    stations = re.findall(r"^(\d+)\. \*\*", page, re.MULTILINE)
    assert stations == [str(n) for n in range(1, len(stations) + 1)] and 8 <= len(stations) <= 12
    files = re.findall(r"`((?:\w+/)*\w+\.py)`", page)
    assert files and not [f for f in files if not (ROOT / f).exists()]
