"""A reward that a model without any knowledge can learn: the share of its characters that are digits."""

from __future__ import annotations


def digits(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
