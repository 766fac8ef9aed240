"""Capturing work as a CUDA graph."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
_one_at_a_time = threading.Lock()  # a drafter may be trained beside decoding, and both capture graphs


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
    with _alone(), torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
        result = work()
    return graph, result


@contextmanager
def _alone() -> Iterator[None]:
    """One capture at a time, which is all that PyTorch can do, and no garbage collected meanwhile: an engine that is
    gone leaves graphs behind, and destroying one breaks a capture."""
    with _one_at_a_time:
        was = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was:
                gc.enable()
