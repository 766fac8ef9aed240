"""Capturing work as a CUDA graph."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.kernels.constants import kept_by

Result = TypeVar("Result")
FREE_FOR_CAPTURE = 1 / 16  # share of the device's memory that is to be free before a capture
_one_at_a_time = threading.Lock()  # a drafter may be trained while sequences are decoded, and both capture graphs


class Graph:
    """A captured graph, with references to the constants that it reads, which it knows only by their addresses. All
    else that it reads belongs to whoever captured it."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.reads: list[Tensor] = []

    def replay(self) -> None:
        self.graph.replay()


def warm_up(work: Callable[[], Any]) -> None:
    """Run `work` once before its capture: kernels are compiled and libraries allocate their workspaces, which must not
    happen inside one."""
    stream = _stream("warm up", torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)


def capture(work: Callable[[], Result], memory: Any, stream: torch.cuda.Stream | None = None) -> tuple[Graph, Result]:
    """Capture `work`, which has been warmed up, in the memory pool `memory` -> the graph, and the result whose tensors
    every replay writes to. Other threads may use the device meanwhile."""
    captured = Graph()
    graph = captured.graph
    torch.cuda.synchronize()
    # Not torch.cuda.graph, which returns all of PyTorch's cached memory to the device each time: the next pass would
    # have to allocate it again.
    with _alone(), torch.cuda.stream(stream or _stream("capture", torch.cuda.current_device())):
        free_memory_for_capture()
        graph.capture_begin(pool=memory, capture_error_mode="thread_local")
        try:
            with kept_by(captured.reads):
                result = work()
        finally:
            graph.capture_end()
    return captured, result


def free_memory_for_capture() -> None:
    """PyTorch's cached memory cannot be returned to the device during a capture, so it is returned before, unless the
    share `FREE_FOR_CAPTURE` is free."""
    free, total = torch.cuda.mem_get_info()
    if free < FREE_FOR_CAPTURE * total:
        torch.cuda.empty_cache()


@functools.cache
def _stream(purpose: str, device: int) -> torch.cuda.Stream:
    """One stream for each purpose: PyTorch reuses cached memory on the same stream only."""
    return torch.cuda.Stream(device)


@contextmanager
def _alone() -> Iterator[None]:
    """One capture at a time, which is all that PyTorch can do, and no garbage collection meanwhile: a dropped engine
    leaves graphs behind, and destroying one breaks a capture."""
    with _one_at_a_time:
        was = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was:
                gc.enable()
