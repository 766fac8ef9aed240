"""Tensors that never change and are made once: numbers in order, masks, the steps of the noise.

A captured graph knows the tensors that it reads by their addresses only. So constants are made before a capture, never
within one, where only a replay would write them; and each graph keeps those that it reads (`kept_by`), whatever becomes
of the table here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec

from torch import Tensor

P = ParamSpec("P")
_capture = threading.local()  # `reads`: the constants that the capture of this thread has met


class Constant(Generic[P]):
    """A function of hashable arguments whose tensors are made once. None is ever dropped: a capture must find what its
    warm-up has made. Their arguments are sizes and devices, of which a process meets few."""

    def __init__(self, make: Callable[P, Tensor]):
        functools.update_wrapper(self, make)
        self._make = make
        self._made: dict[object, Tensor] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        assert not kwargs, "constants go by their positional arguments"
        tensor = self._made.get(args)
        reads: list[Tensor] | None = getattr(_capture, "reads", None)
        if tensor is None:
            assert reads is None, f"{self._make.__name__}{args} must be made before the capture that reads it"
            tensor = self._made[args] = self._make(*args, **kwargs)
        if reads is not None:
            reads.append(tensor)
        return tensor

    def cache_clear(self) -> None:
        self._made.clear()


def constant(make: Callable[P, Tensor]) -> Constant[P]:
    return Constant(make)


@contextmanager
def kept_by(reads: list[Tensor]) -> Iterator[None]:
    """Within it, constants that this thread asks for are put into the list, and none may be new."""
    _capture.reads = reads
    try:
        yield
    finally:
        _capture.reads = None
