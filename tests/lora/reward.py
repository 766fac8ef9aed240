"""A reward that tells most answers of a random model apart, for texts and messages."""

from __future__ import annotations


def digits(completions: list, **_: object) -> list[float]:
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [sum(c.isdigit() for c in text) / 10 for text in texts]


DIGITS = f"reward.functions=[{{function: '{__file__}:digits'}}]"
