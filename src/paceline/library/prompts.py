"""Prompts as callers write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors import UserError
from paceline.model.tokenizer import Tokenizer

Prompt = str | list[dict[str, Any]]
"""Text, or messages with role and content."""


def encode(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    if isinstance(prompts, str) or any(isinstance(p, dict) for p in prompts):
        raise UserError("prompts is a single prompt, but should be a list of them: put it in brackets")
    texts = [tuple(tokenizer.encode_prompt(p)) for p in prompts]
    for i, text in enumerate(texts):
        if not text:
            raise UserError("the prompt is empty" if len(texts) == 1 else f"prompt {i} is empty")
    return texts
