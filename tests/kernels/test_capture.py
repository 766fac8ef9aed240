"""Garbage collection does not break a capture, and a graph keeps the constants that it reads."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest
import torch

from paceline.draft import tree
from paceline.kernels import capture as capturing
from paceline.kernels import noise, paged_attention, positions
from paceline.kernels.capture import _alone, capture, warm_up
from paceline.kernels.constants import Constant, constant
from paceline.kernels.hopper import matmul


class Owner:
    """Like a dropped engine: only the garbage collector finds it, and its graph with it."""

    def __init__(self, graph: torch.cuda.CUDAGraph):
        self.graph = graph
        self.own = self


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


class FakeGraph:
    """For a machine without a GPU: what is captured runs once, and replays do nothing."""

    capture_begin = capture_end = replay = lambda self, **_: None


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(capturing, "_stream", lambda *_: None)
    monkeypatch.setattr(capturing, "free_memory_for_capture", lambda: None)


CPU = torch.device("cpu")
CONSTANTS = {
    "up_to": (positions.up_to, lambda: positions.up_to(917, CPU)),
    "chain_tree": (paged_attention._chain_bits, lambda: paged_attention.chain_tree(5, 61, CPU)),
    "gumbel": (noise._steps, lambda: noise.gumbel(torch.zeros(2, dtype=torch.int64), 917)),
    "tree counts": (tree._count, lambda: tree._count(917, CPU)),
    "tree rows": (tree._eye, lambda: tree.tree(torch.zeros(2, 60, dtype=torch.int32), 3)),
    "tree bits": (tree._bits, lambda: tree.tree(torch.zeros(2, 60, dtype=torch.int32), 3)),
    "no bias": (matmul._no_bias, lambda: matmul._no_bias(917, torch.float32, CPU)),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_graph_keeps_the_constants_that_it_reads(no_gpu, name):
    """It knows their addresses, and nothing else may be left that knows them."""
    table, work = CONSTANTS[name]
    table.cache_clear()
    work()
    read = [weakref.ref(tensor) for tensor in table._made.values()]
    graph, _ = capture(lambda: work() is None, None)
    table.cache_clear()
    gc.collect()
    assert read and all(ref() is not None for ref in read)
    del graph
    gc.collect()
    assert all(ref() is None for ref in read), "nobody else kept them: it was the graph"


@pytest.mark.gpu
def test_a_graph_reads_its_constants_when_the_memory_is_asked_for_again():
    device, work = torch.device("cuda"), lambda: positions.up_to(917, device) + 1
    warm_up(work)
    graph, result = capture(work, torch.cuda.graph_pool_handle())
    positions.up_to.cache_clear()
    others = [torch.zeros(917, dtype=torch.int64, device=device) for _ in range(64)]
    graph.replay()
    assert result.tolist() == list(range(1, 918)) and not any(other.any() for other in others)


def test_what_a_graph_reads_is_there_before_the_capture(no_gpu):
    """Made within it, only a replay would write it, and whoever else asks for it would read what was there before."""
    numbers = constant(lambda n: torch.arange(n))
    with pytest.raises(AssertionError, match="before the capture"):
        capture(lambda: numbers(5), None)
    assert numbers(5).tolist() == [0, 1, 2, 3, 4], "and a failed capture leaves no trace"
    graph, result = capture(lambda: numbers(5) + 1, None)
    assert result.tolist() == [1, 2, 3, 4, 5] and [t.data_ptr() for t in graph.reads] == [numbers(5).data_ptr()]


def test_constants_stay_where_they_are_however_many_there_are():
    numbers = Constant(lambda n: torch.arange(n))
    first = [numbers(n) for n in range(1000)]
    assert all(numbers(n) is tensor for n, tensor in enumerate(first))


def test_a_capture_notes_what_its_own_thread_reads(no_gpu):
    """Another thread may be decoding without a graph."""
    numbers = constant(lambda n: torch.arange(n))
    numbers(3)

    def work() -> None:
        other = threading.Thread(target=lambda: (numbers(7), numbers(3)))
        other.start()
        other.join(60)
        assert not other.is_alive()

    graph, _ = capture(work, None)
    assert graph.reads == [] and len(numbers._made) == 2


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
