"""Graphs that are captured before the first request: which, and that running them without one changes nothing."""

from __future__ import annotations

import pytest

from paceline.draft.ladder import batch_ladder
from paceline.draft.registry import default_strategies
from paceline.draft.strategy import PLAIN, TREE_ROWS, Strategy
from paceline.rollout.capture import MAX_ROWS, rounds_to_capture
from paceline.rollout.filters import Filters

from .test_engine import make_requests
from .test_overlap import PretendedGraphs, answers, at_random, is_clean, make, same


def test_which_rounds_are_captured():
    strategies, ladder = default_strategies(["suffix", "neural"]), batch_ladder(256)
    rounds = rounds_to_capture(ladder, strategies)
    assert len(rounds) == len(set(rounds)) and [b for b, s in rounds if s.plain] == ladder
    assert {s for b, s in rounds if b == 1} == set(strategies), "all of them for the last sequence of a rollout"
    assert max(b * s.num_verified for b, s in rounds) <= MAX_ROWS
    assert all(b * s.num_verified <= TREE_ROWS for b, s in rounds if not s.chain)
    deep, short = Strategy.parse("neural:10"), Strategy.parse("neural:3")
    assert max(b for b, s in rounds if s == deep) == 64 and max(b for b, s in rounds if s == short) == 256
    assert rounds_to_capture([1, 2], [PLAIN]) == [(1, PLAIN), (2, PLAIN)]


@pytest.mark.parametrize(("overlap", "graphs"), [(False, False), (True, False), (True, True)])
def test_rounds_without_requests_change_nothing(overlap, graphs):
    requests = make_requests(12, seed=5, groups=4, shortest=20, longest=50, min_tokens=7)
    expected = answers(make(False, lambda batch: PLAIN), requests)
    engine = make(overlap, at_random(5))
    if graphs:
        engine.runner.graphs = PretendedGraphs()
    before = engine.rows.host.clone()
    engine.capture()
    assert (engine.rows.host == before).all(), "the host's rows are as they were"
    assert engine.pool.free == engine.pool.usable
    for pool in (engine.pool.k, engine.pool.v):
        assert not pool[:, 1:].any(), "only the scratch page was written"
    for part in (engine.drafters["neural"].ring.features, engine.drafters["neural"].cache.k):
        assert not part[1:].any(), "only the scratch slot was written"
    same(answers(engine, requests), expected)
    is_clean(engine)


def test_rounds_find_their_graphs():
    engine = make(True)
    graphs = engine.runner.graphs = PretendedGraphs()
    engine.capture()
    known = set(graphs.known)
    assert ("plain", 6, Filters.NONE) in known
    answers(engine, make_requests(8, shortest=30, longest=40, stops=()))
    assert {key[0] for key in graphs.known - known} <= {"catch up"}
