"""Chat templates: programs that come with a model. A sandbox keeps them from reaching anything; a limit on their steps
keeps them from running for ever. Their memory is not bounded: a template can double a text thirty times."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

MAX_STEPS = 2_000_000
"""Lines that a template may run for one prompt; those of known models run some thousands for a long conversation. It
stops one that would not end after about half a second."""


class TooManySteps(Exception):
    """A template that would not come to an end."""


@contextmanager
def bounded_steps(limit: int = MAX_STEPS) -> Iterator[None]:
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
