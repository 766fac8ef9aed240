"""Which of a run's settings were decided rather than given.

`RUN/config.yaml` leaves nothing open; `RUN/decided.yaml` says which of its values were not given, so that a report can
tell them apart and a resumed run can decide again. A value that was edited since is a given one.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from paceline.config import Config, build_config, flat
from paceline.config.renamed import RENAMED
from paceline.errors import UserError
from paceline.files.reading import check, read_yaml

FILE = "decided.yaml"
HEAD = "# What the settings left open, and what was decided. A value that you change in config.yaml counts as given.\n"


class SettingDecision(BaseModel):
    model_config = ConfigDict(extra="forbid")

    given: Any
    decided: Any


Decisions = dict[str, SettingDecision]
"""By dotted key."""


def read_decisions(folder: Path) -> Decisions:
    file = folder / FILE
    if not file.exists():
        return {}
    try:
        decisions = check(Decisions, read_yaml(file) or {}, str(file))
    except UserError as err:
        raise UserError(f"{err}; remove it to take all that config.yaml says as given") from err
    return {RENAMED.get(key, key): decision for key, decision in decisions.items()}


def dump_decisions(made: Decisions) -> str:
    return HEAD + yaml.safe_dump({key: decision.model_dump() for key, decision in made.items()}, sort_keys=False)


def compare(given: Config, decided: Config) -> Decisions:
    """Where two configs differ."""
    after = dict(flat(decided.model_dump(mode="json")))
    pairs = ((key, value, after[key]) for key, value in flat(given.model_dump(mode="json")) if key in after)
    return {key: SettingDecision(given=value, decided=now) for key, value, now in pairs if value != now}


def reopen(config: Config, made: Decisions, keep: Collection[str] = ()) -> Config:
    """The config with what was decided open again, but for these keys, and for what was edited since."""
    values = config.model_dump(mode="json")
    for key, decision in made.items():
        *path, last = key.split(".")
        section: Any = values
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
        if key not in keep and isinstance(section, dict) and last in section and section[last] == decision.decided:
            section[last] = decision.given
    return build_config(values, where=FILE)
