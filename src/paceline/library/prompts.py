"""Prompts as callers write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors import UserError
from paceline.model.tokenizer import Tokenizer
from paceline.tasks.rows import check_prompt

Prompt = str | list[dict[str, Any]]
"""Text, or messages with role and content."""


def encode(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    if isinstance(prompts, str) or any(isinstance(p, dict) for p in prompts):
        raise UserError("prompts is a single prompt, but should be a list of them: put it in brackets")
    encoded: list[tuple[int, ...]] = []
    for i, prompt in enumerate(prompts):
        origin = f"prompts[{i}]"
        check_prompt(prompt, origin)
        encoded.append(tuple(tokenizer.encode_prompt(prompt, origin)))
        if not encoded[-1]:
            raise UserError(f"{origin} is empty: it has no tokens")
    return encoded
