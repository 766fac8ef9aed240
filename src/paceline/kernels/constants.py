"""Constant tensors, made once per device: index ranges, masks, the steps of the noise stream.

A captured graph knows the tensors that it reads by their addresses only. So constants are made before a capture, never
within one, where only a replay would write them; and each graph holds references to those that it reads (`kept_by`), so
that they outlive the cache here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec

from torch import Tensor

P = ParamSpec("P")
_capture = threading.local()  # `reads`: the constants that this thread has asked for during its capture


class Constant(Generic[P]):
    """A cached function of hashable arguments that returns a tensor. Nothing is evicted: a capture must find what its
    warm-up has made. The arguments are sizes and devices, of which a process meets few."""

    def __init__(self, make: Callable[P, Tensor]):
        functools.update_wrapper(self, make)
        self._make = make
        self._made: dict[object, Tensor] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        assert not kwargs, "constants are cached by their positional arguments"
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
    """Decorates a function that makes a constant tensor."""
    return Constant(make)


@contextmanager
def kept_by(reads: list[Tensor]) -> Iterator[None]:
    """Within it, constants that this thread asks for are appended to `reads`, and none may be made."""
    _capture.reads = reads
    try:
        yield
    finally:
        _capture.reads = None
