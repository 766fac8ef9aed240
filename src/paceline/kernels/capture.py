"""Capturing work as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def warm_up(work: Callable[[], Any]) -> None:
    """Kernels are compiled and libraries warm up, which must not happen inside a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)


def capture(
    work: Callable[[], Result], memory: Any, stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Work that has warmed up, as a graph, and what every replay of it writes to. Other threads may use the device
    meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with _no_garbage(), torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
        result = work()
    return graph, result


@contextmanager
def _no_garbage() -> Iterator[None]:
    """An engine that is gone leaves graphs behind for the garbage collector, and destroying one breaks a capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
