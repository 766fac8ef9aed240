"""Chat templates: programs that come with a model. A sandbox keeps them from reaching anything; a limit on their steps
keeps them from running for ever. Their memory is not bounded: a template can double a string thirty times."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from paceline.errors import UserError
from paceline.files.reading import shorten

MAX_TEMPLATE_LINES = 2_000_000
"""Lines of Python that a template may run for one prompt; those of known models run some thousands for a long
conversation. An endless one is stopped after about half a second."""


class TooManySteps(Exception):
    """A template that did not end within the limit."""


@contextmanager
def bounded_steps(limit: int = MAX_TEMPLATE_LINES) -> Iterator[None]:
    """Count the lines of Python that run within, and stop at the limit. Templates are compiled to Python, so this
    counts loops however they are nested; it works in any thread, where signals would not."""
    steps = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > limit:
            raise TooManySteps(f"it did not end within {limit:,} steps")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


RESERVED = ("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt")
"""What is ours to say, or the library's own."""


def check_template_kwargs(kwargs: dict[str, Any], template: Any, where: str) -> None:
    """Refuse variables that a chat template does not read: it would go on as if they had not been given."""
    texts = " ".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")
    for name in kwargs:
        if name in RESERVED or not name.isidentifier():
            raise UserError(f"task.chat_template_kwargs sets '{shorten(name)}', which is not a variable to be set")
        if not re.search(rf"\b{name}\b", texts):
            raise UserError(
                f"task.chat_template_kwargs sets '{shorten(name)}', which the chat template of {where} does not read"
                if texts
                else f"task.chat_template_kwargs is set, but the tokenizer of {where} has no chat template"
            )
