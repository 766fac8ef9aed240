"""A terminal that may go away without ending the run."""

from __future__ import annotations

import contextlib
import os
from typing import IO, Any


class DurableStream:
    """A stream that may be closed: the terminal was, or the reader of the pipe has ended. From then on writing does
    nothing."""

    def __init__(self, stream: IO[str]):
        self._stream = stream
        self._closed = False

    def write(self, text: str) -> int:
        return self._try("write", text) or len(text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, name: str, *args: str) -> Any:
        if self._closed:
            return None
        try:
            return getattr(self._stream, name)(*args)
        except UnicodeError:
            raise
        except (OSError, ValueError):  # ValueError: it was closed in this process
            self._closed = True
            # What is still in its buffer would fail again when the program ends, and change its exit code.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), self._stream.fileno())
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
