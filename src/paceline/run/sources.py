"""Files that a run is made from, besides its model: data sets and reward functions of one's own.

A run names them by absolute paths, so that it can be resumed from any directory, and knows them by their hash, so that
one that has changed since is noticed: other data is refused, because the run's place in it would mean other prompts;
another reward function is told, because correcting it may be why the run is resumed. Reward files are copied into the
run, which stand in for those that have gone.

    RUN/sources.json                the hash of each file by its path
    RUN/sources/HASH/reward.py      copies of reward files
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from paceline.config import Config
from paceline.errors import UserError
from paceline.files import reading
from paceline.files.writing import write_aside

INDEX = "sources.json"
COPIES = "sources"
DATA = (".jsonl", ".json", ".parquet")
REWARD_BYTES = 16 * 2**20
"""Of a reward file that is copied."""
CHUNK = 2**20


class SourceFile(BaseModel):
    """A file as it was when the run last used it."""

    model_config = ConfigDict(extra="forbid")

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    copied: bool = False
    """Whether the run has a copy of it."""


@dataclass
class SourceCheck:
    """What has become of a run's files."""

    stand_ins: dict[str, str] = field(default_factory=dict)
    """Path of a reward file that has gone -> its copy in the run."""
    changed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Path of a reward file that is another one now -> its hashes."""


def with_absolute_paths(config: Config) -> Config:
    """The config with every file and folder that is there named by its absolute path."""
    functions = [f.model_copy(update={"function": _absolute_function(f.function)}) for f in config.reward.functions]
    evaluated = [f.model_copy(update={"function": _absolute_function(f.function)}) for f in config.eval.functions]
    changes: dict[str, dict[str, Any]] = {
        "model": {"path": _absolute(config.model.path) if config.model.path != "embedded" else "embedded"},
        "task": {"name": _absolute_data(config.task.name)},
        "reward": {"functions": functions},
        "environment": {
            "name": _absolute_function(config.environment.name) if config.environment.name else None,
            "tools": [_absolute_function(name) for name in config.environment.tools],
        },
        "eval": {"task": _absolute_data(config.eval.task) if config.eval.task else None, "functions": evaluated},
    }
    if config.speculation.drafter not in (None, "auto", "new", "none"):
        changes["speculation"] = {"drafter": _absolute(config.speculation.drafter)}
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)


def _absolute(name: str) -> str:
    """Of something that is there; anything else, such as a hub id, stays as it is."""
    try:
        path = reading.named_path(name)
        return os.path.abspath(path) if os.path.lexists(path) else name
    except UserError:
        return name


def _absolute_data(name: str) -> str:
    """Of data that is there: a file, several, a pattern, or a folder with a configuration of it."""
    if os.path.lexists(name) or "," not in name:
        return _absolute_part(name)
    return ",".join(map(_absolute_part, name.split(",")))


def _absolute_part(name: str) -> str:
    if name.startswith(("hub:", "gym:", "grid:")) or name == "countdown":
        return name
    if _matches(name):
        return os.path.abspath(name)
    folder, colon, configuration = name.rpartition(":")
    return f"{_absolute(folder)}:{configuration}" if colon and os.path.isdir(folder) else name


def _matches(name: str) -> list[str]:
    """The files that a name of data means, if it means files: itself, or those of a pattern."""
    if Path(name).suffix not in DATA or "\0" in name:
        return []
    return [name] if os.path.isfile(name) else sorted(filter(os.path.isfile, glob(name)))


def _absolute_function(name: str) -> str:
    """`file.py:function`, also of a module that is a file of the present directory: `module:function`."""
    module, colon, function = name.rpartition(":")
    if not colon:
        return name
    if module.isidentifier() and os.path.isfile(f"{module}.py"):
        module = f"{module}.py"
    return f"{_absolute(module)}:{function}" if module.endswith(".py") else name


def _files(config: Config) -> Iterator[tuple[str, bool]]:
    """(path, whether it is a reward's) of those that are there or should be."""
    names = [config.task.name] if os.path.lexists(config.task.name) else config.task.name.split(",")
    for file in (file for name in names for file in _matches(name)):
        yield file, False
    named = [one.function for one in config.reward.functions] + [*config.environment.tools]
    for name in [*named, *([config.environment.name] if config.environment.name else [])]:
        module = name.rpartition(":")[0]
        if module.endswith(".py"):
            yield module, True


def write_sources(folder: Path, config: Config) -> None:
    """Note the files that the settings name, as they are now, and copy those of rewards. What is not there, whoever
    needs it will say."""
    known = read_sources(folder)
    found = dict(known)
    for name, is_reward in _files(config):
        if os.path.isfile(name):
            digest = _hash(name)
            if name not in known or known[name].sha256 != digest:
                found[name] = SourceFile(sha256=digest, copied=is_reward and _copy(name, folder, digest))
    if found != known:
        values = {name: source.model_dump(exclude_none=True) for name, source in found.items()}
        write_aside(folder / INDEX, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def read_sources(folder: Path) -> dict[str, SourceFile]:
    """By path; empty for a run of an earlier version."""
    if not os.path.lexists(folder / INDEX):
        return {}
    file = reading.inside(folder, INDEX)
    return reading.check(dict[str, SourceFile], reading.read_object(file), str(file))


def check_sources(folder: Path, config: Config) -> SourceCheck:
    """Whether the files of a run that is resumed are those that it had."""
    known = read_sources(folder)
    out = SourceCheck()
    for name, is_reward in _files(config):
        source = known.get(name)
        if source is None:
            continue
        if not os.path.isfile(name):
            copy = _copy_of(name, folder, source.sha256)
            if source.copied and copy.is_file():
                out.stand_ins[name] = str(copy.absolute())
            continue
        digest = _hash(name)
        if digest == source.sha256:
            continue
        if not is_reward:
            raise UserError(
                f"{name} has changed since the run began, so that its place in it would mean other prompts; bring back "
                "the file as it was, or start a new run whose model.path is a checkpoint of this one"
            )
        out.changed[name] = (source.sha256[:12], digest[:12])
    return out


def with_stand_ins(config: Config, stand_ins: dict[str, str]) -> Config:
    """Reward functions, environments and tools by the copies of files that have gone."""
    if not stand_ins:
        return config

    def stand_in(name: str) -> str:
        module, colon, function = name.rpartition(":")
        return f"{stand_ins.get(module, module)}{colon}{function}"

    functions = [one.model_copy(update={"function": stand_in(one.function)}) for one in config.reward.functions]
    e = config.environment
    names = {"name": stand_in(e.name) if e.name else None, "tools": [stand_in(name) for name in e.tools]}
    return config.model_copy(
        update={
            "reward": config.reward.model_copy(update={"functions": functions}),
            "environment": e.model_copy(update=names),
        }
    )


def _copy_of(name: str, folder: Path, digest: str) -> Path:
    """Called like the file, so that messages name it, in a folder for each version."""
    return folder / COPIES / digest[:12] / Path(name).name


def _copy(name: str, folder: Path, digest: str) -> bool:
    """Copy a reward file into the run, unless it is larger than any program."""
    if os.path.getsize(name) > REWARD_BYTES:
        return False
    copy = _copy_of(name, folder, digest)
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_aside(copy, Path(name).read_bytes())
    return True


def _hash(name: str) -> str:
    digest = hashlib.sha256()
    try:
        with open(name, "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as err:
        raise UserError(f"{name} cannot be read: {err.strerror}") from err
    return digest.hexdigest()
