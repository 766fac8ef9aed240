"""Types and bounds that settings share, and what a section of them is."""

from __future__ import annotations

import math
from datetime import date
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from paceline.files import reading

# Bounds on numbers that could only be mistakes, and would otherwise end in hours of waiting or without memory.
COUNT = 2**62
TOKENS = 2**31 - 1
REQUESTS = 2**20
"""Completions of one step."""
SECONDS = 1e6
"""Of a time limit: eleven days. What waits for a process takes milliseconds as 32-bit numbers."""
GIGABYTES = 1e6
PROCESSES = 1024


def _no_zero(text: str) -> str:
    if "\0" in text:
        raise ValueError("it holds a zero byte, which no name or path can")
    return text


Name = Annotated[str, Field(min_length=1), AfterValidator(_no_zero)]
"""Of a file, a folder, a device, a column."""


def joined_names(value: Any) -> Any:
    """A list of names as one text, separated by commas."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) and one for one in value):
        return ",".join(value)
    return value


def _with_days_as_text(options: Any) -> Any:
    """YAML reads 2014-01-01 as a date."""
    if not isinstance(options, dict):
        return options
    return {key: value.isoformat() if isinstance(value, date) else value for key, value in options.items()}


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Numbers, strings, booleans, lists and sections: what a recipe can say and a run directory can keep."""
    level: list[Any] = [options]
    for _ in range(reading.MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                if not all(isinstance(key, str) for key in one):
                    raise ValueError("its keys should be text")
                below += one.values()
            elif isinstance(one, list | tuple):
                below += one
            elif isinstance(one, float) and not math.isfinite(one):
                raise ValueError("it holds a number that is not finite")
            elif one is not None and not isinstance(one, str | int | float):
                raise ValueError(f"it holds a {type(one).__name__}, which is not a number, text, list or section")
        if not below:
            return options
        level = below
    raise ValueError(f"it is nested more than {reading.MAX_DEPTH} levels deep")


def _number(text: str) -> Any:
    """YAML reads 1e-5 as text (it wants a dot), but nobody who writes it for a number means text."""
    try:
        return float(text) if text[:1] in "0123456789.-+" else text
    except ValueError:
        return text


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    return _number(value) if isinstance(value, str) else value


Options = Annotated[
    dict[str, Any], BeforeValidator(_numbers), BeforeValidator(_with_days_as_text), AfterValidator(_plain)
]
"""Plain data that is passed on to another library."""


class Section(BaseModel):
    """Settings that belong together. Unknown keys are errors, and a field's docstring is its description."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _number_or_not(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML takes yes, no, on and off for booleans, and a temperature that is off would be 0."""
        kind = cls.model_fields[info.field_name].annotation if info.field_name else None
        if not {kind, *get_args(kind)} & {int, float}:
            return value
        if isinstance(value, bool):
            raise ValueError(f"it should be a number, but YAML takes what was written for {str(value).lower()}")
        return _number(value) if isinstance(value, str) else value
