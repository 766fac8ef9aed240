"""Names that settings had before. For this version they keep working, with a warning that names the new one: in
recipes, overrides, settings given in Python, and the config.yaml and decided.yaml of runs made before.

A setting that changes its name needs a line in `RENAMED` and nothing else.
"""

from __future__ import annotations

import warnings
from typing import Any

from paceline.errors import RenamedSetting, UserError

RENAMED = {
    "spot.rarely": "spot.max_interval",
    "learn.is_cap": "learn.importance_sampling_cap",
    "learn.decay": "learn.lr_scheduler",
    "learn.lr_end": "learn.min_lr_ratio",
}
"""Dotted key before -> dotted key now, in the same section."""


def current_name(key: str, where: str) -> str:
    """The name that a setting has now; warns if it was given by an earlier one."""
    if key not in RENAMED:
        return key
    warnings.warn(f"the setting '{key}' in {where} is now called '{RENAMED[key]}'", RenamedSetting, stacklevel=2)
    return RENAMED[key]


def rename(values: Any, where: str, prefix: str = "") -> Any:
    """Settings, or those of one section or the value of one (`prefix` is its dotted key), by their present names."""
    if not isinstance(values, dict) or not any(old.startswith(f"{prefix}." if prefix else "") for old in RENAMED):
        return values
    out: dict[Any, Any] = {}
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        now = current_name(key, where)
        if now != key and now.rpartition(".")[2] in values:
            raise UserError(f"'{key}' and '{now}' in {where} are two names of one setting; keep '{now}'")
        out[now.rpartition(".")[2] if now != key else name] = rename(value, where, key)
    return out
