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
ROOM = 1 / 16  # of the card's memory that is to be free before a capture
_one_at_a_time = threading.Lock()  # a drafter may be trained beside decoding, and both capture graphs


class Graph:
    """A captured graph and the constants that it reads, which it knows only by their addresses. All else that it reads
    belongs to whoever captured it."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.reads: list[Tensor] = []

    def replay(self) -> None:
        self.graph.replay()


def warm_up(work: Callable[[], Any]) -> None:
    """Kernels are compiled and libraries warm up, which must not happen inside a capture."""
    stream = _stream("warm up", torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)


def capture(work: Callable[[], Result], memory: Any, stream: torch.cuda.Stream | None = None) -> tuple[Graph, Result]:
    """Work that has warmed up, as a graph, and what every replay of it writes to. Other threads may use the device
    meanwhile."""
    captured = Graph()
    graph = captured.graph
    torch.cuda.synchronize()
    # Not torch.cuda.graph, which gives back all that PyTorch keeps, each time: the next pass would ask for it again.
    with _alone(), torch.cuda.stream(stream or _stream("capture", torch.cuda.current_device())):
        make_room()
        graph.capture_begin(pool=memory, capture_error_mode="thread_local")
        try:
            with kept_by(captured.reads):
                result = work()
        finally:
            graph.capture_end()
    return captured, result


def make_room() -> None:
    """Memory that PyTorch keeps for later cannot be given back during a capture, so some has to be free."""
    free, total = torch.cuda.mem_get_info()
    if free < ROOM * total:
        torch.cuda.empty_cache()


@functools.cache
def _stream(purpose: str, device: int) -> torch.cuda.Stream:
    """One for each purpose: memory that PyTorch keeps is used again on the same stream only."""
    return torch.cuda.Stream(device)


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
