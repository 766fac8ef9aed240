"""Captured CUDA graphs by key, sharing one memory pool, within a limit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Work = Callable[[], tuple[Tensor, ...]]


class GraphPool:
    def __init__(self, limit_bytes: int | None = None):
        """Beyond `limit_bytes` nothing more is captured, and what was not runs without a graph."""
        self.limit = limit_bytes
        self.memory_bytes = 0
        self.captured = 0
        self._graphs: dict[object, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._memory = torch.cuda.graph_pool_handle()
        # What is captured on a stream keeps its priority: where the drafter is trained beside it, decoding goes first.
        # One for all graphs, because memory of the pool is used again on the same stream only.
        self._urgent = torch.cuda.Stream(priority=-1)

    def run(self, key: object, work: Work) -> tuple[Tensor, ...]:
        if key not in self._graphs:
            if self.limit is not None and self.memory_bytes >= self.limit:
                return work()
            self._graphs[key] = self._capture(work)
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def _capture(self, work: Work) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles kernels and warms up libraries, which must not happen inside a capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # as a capture does when it begins, which would hide what it takes
        before = torch.cuda.memory_reserved()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._urgent, capture_error_mode="thread_local"):
            output = work()
        self.memory_bytes += max(0, torch.cuda.memory_reserved() - before)
        self.captured += 1
        return graph, output
