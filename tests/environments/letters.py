"""A reward that tells any two answers apart, of a conversation with all that was said in it."""

from __future__ import annotations


def letters(completions, environment_reward, **_: object) -> list[float]:
    texts = ["".join(str(m["content"]) for m in c) if isinstance(c, list) else c for c in completions]
    return [
        sum(ord(c) % 31 for c in text) / 1000 + (given or 0.0)
        for text, given in zip(texts, environment_reward, strict=True)
    ]


def counted(completions, environments, **_: object) -> list[float]:
    """As in TRL's documentation."""
    return [float(environment.value) for environment in environments]


def messages_seen(completions, **_: object) -> list[float]:
    roles = ["assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert all([m["role"] for m in c] == roles for c in completions)
    return [float(len(c)) for c in completions]
