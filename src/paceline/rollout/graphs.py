"""Captured CUDA graphs by key, sharing one memory pool, within a limit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.kernels.capture import Graph, capture, free_memory_for_capture, warm_up

Work = Callable[[], tuple[Tensor, ...]]


class GraphPool:
    def __init__(self, limit_bytes: int | None = None):
        """Beyond `limit_bytes` nothing more is captured, and what was not runs without a graph."""
        self.limit = limit_bytes
        self.memory_bytes = 0
        self.captured = 0
        self._graphs: dict[object, tuple[Graph, tuple[Tensor, ...]]] = {}
        self._memory = torch.cuda.graph_pool_handle()
        # What is captured on a stream keeps its priority: where the drafter is trained at the same time, decoding goes
        # first.
        # One for all graphs, because memory of the pool is used again on the same stream only.
        self._urgent = torch.cuda.Stream(priority=-1)

    def run(self, key: object, work: Work, changed: Tensor | None = None) -> tuple[Tensor, ...]:
        """`changed` is what the work changes so that it would not do the same a second time."""
        if key not in self._graphs:
            if self.limit is not None and self.memory_bytes >= self.limit:
                return work()
            self._graphs[key] = self._capture(work, changed)
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def _capture(self, work: Work, changed: Tensor | None) -> tuple[Graph, tuple[Tensor, ...]]:
        before_it = None if changed is None else changed.clone()
        warm_up(work)
        if changed is not None and before_it is not None:
            changed.copy_(before_it)
        free_memory_for_capture()  # as a capture does when it begins, which would hide what it takes
        before = torch.cuda.memory_reserved()
        captured = capture(work, self._memory, self._urgent)
        self.memory_bytes += max(0, torch.cuda.memory_reserved() - before)
        self.captured += 1
        return captured
