"""A reward that tells any two answers apart, so that every group has a signal."""

from __future__ import annotations

DIGITS = f"reward.functions=[{{function: '{__file__}:digits'}}]"


def digits(completions: list[str], **_: object) -> list[float]:
    return [sum(int(c) for c in text if c.isdigit()) / 100 for text in completions]
