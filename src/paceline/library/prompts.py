"""Prompts and models as callers write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.model.tokenizer import Tokenizer
from paceline.tasks.rows import check_prompt

Prompt = str | list[dict[str, Any]] | list[int]
"""Text, messages with role and content, or the ids of tokens."""


def model_name(model: object, taker: str) -> str:
    """The name of a model; an object with weights is refused, because workers load them from a folder."""
    if isinstance(model, str | Path):
        return str(model)
    raise UserError(
        f"{taker} takes the name of a model, a folder or a hub id, and not a {type(model).__name__}: save it with "
        "model.save_pretrained(FOLDER) and tokenizer.save_pretrained(FOLDER), and give FOLDER"
    )


def encode(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    if isinstance(prompts, str) or any(isinstance(p, dict | int) for p in prompts):
        raise UserError("prompts is a single prompt, but should be a list of them: put it in brackets")
    encoded: list[tuple[int, ...]] = []
    for i, prompt in enumerate(prompts):
        origin = f"prompts[{i}]"
        if isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], dict):
            encoded.append(_tokens(tokenizer, prompt, origin))
            continue
        check_prompt(prompt, origin)
        encoded.append(tuple(tokenizer.encode_prompt(prompt, origin)))  # type: ignore[arg-type]
        if not encoded[-1]:
            raise UserError(f"{origin} is empty: it has no tokens")
    return encoded


def _tokens(tokenizer: Tokenizer, prompt: Sequence[Any], origin: str) -> tuple[int, ...]:
    known = tokenizer.vocab_size or len(tokenizer.hf)
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < known:
            raise UserError(f"{origin} holds {token!r}, but the ids of this model's tokens are 0 to {known - 1}")
    return tuple(prompt)
