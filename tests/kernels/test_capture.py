"""A capture holds, whatever the garbage collector would like to do meanwhile."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from paceline.kernels.capture import _alone, capture, warm_up


class Owner:
    """As an engine that is gone: only the collector finds it, and its graph with it."""

    def __init__(self, graph: torch.cuda.CUDAGraph):
        self.graph, self.own = graph, self


@pytest.mark.gpu
def test_graphs_that_became_garbage_do_not_break_a_capture():
    number = torch.ones((), device="cuda")

    def work() -> torch.Tensor:
        littered = [[] for _ in range(50)]
        for i, litter in enumerate(littered):  # enough for the collector to run, many times
            litter.append(littered[i - 1])
        return number + len(littered)

    threshold = gc.get_threshold()
    warm_up(work)
    Owner(capture(work, torch.cuda.graph_pool_handle())[0])
    gc.set_threshold(1)
    try:
        graph, result = capture(work, torch.cuda.graph_pool_handle())
    finally:
        gc.set_threshold(*threshold)
    graph.replay()
    assert result.item() == 51 and gc.isenabled()


def test_one_capture_at_a_time_and_no_garbage_meanwhile():
    entered = []

    def other() -> None:
        with _alone():
            entered.append(gc.isenabled())

    thread = threading.Thread(target=other)
    with _alone():
        thread.start()
        thread.join(0.05)
        assert not gc.isenabled() and not entered
    thread.join()
    assert entered == [False] and gc.isenabled(), "whoever was first does not end it for the other"


@pytest.mark.gpu
def test_a_capture_leaves_what_pytorch_keeps_alone():
    work = lambda: torch.ones(8, device="cuda") + 1  # noqa: E731
    warm_up(work)
    kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    where = kept.data_ptr()
    del kept
    graph, result = capture(work, torch.cuda.graph_pool_handle())
    graph.replay()
    assert result.tolist() == [2] * 8
    assert torch.empty(1 << 30, dtype=torch.uint8, device="cuda").data_ptr() == where
