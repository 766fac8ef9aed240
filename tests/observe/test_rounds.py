"""Rounds become few spans, and nothing that they say is lost on the way."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.draft.ladder import batch_ladder
from paceline.observe.rounds import RoundLog
from paceline.observe.strategy_totals import bucket_above, bucket_below, bucket_of, read_totals
from paceline.observe.timeline import DECODE_PLAIN, DECODE_SPECULATIVE, PREFILL, ROLLOUT, Span
from paceline.rollout.stats import RoundRecord


def logged(rounds: list[RoundRecord]) -> list[Span]:
    spans: list[Span] = []
    log = RoundLog(spans.append, worker=2)
    log.step = 7
    for r in rounds:
        log(r)
    log.end()
    return spans


def in_turn(*parts: tuple[str, int, int], seconds: float = 0.01) -> list[RoundRecord]:
    out: list[RoundRecord] = []
    for strategy, count, batch in parts:
        out += [RoundRecord((len(out) + i) * seconds, seconds, batch, strategy, 2 * batch) for i in range(count)]
    return out


def test_rounds_of_a_kind_are_one_span():
    before = time.time()
    spans = logged(in_turn(("prefill", 1, 8), ("plain", 5, 8), ("neural:5", 9, 8), ("suffix:3", 4, 7)))
    after = time.time()
    assert [(s.name, s.args.get("rounds")) for s in spans] == [
        (PREFILL, 1),
        (DECODE_PLAIN, 5),
        (DECODE_SPECULATIVE, 13),
        (ROLLOUT, None),
    ]
    speculative = spans[2]
    assert speculative.seconds == pytest.approx(0.13) and speculative.args["tokens"] == 2 * (9 * 8 + 4 * 7)
    assert speculative.args["batch"] == [8, 7] and (speculative.worker, speculative.step) == (2, 7)
    assert before - 1e-6 <= spans[0].end <= after + 1e-6, "by the wall clock, so that processes agree"


def test_a_batch_that_halves_starts_a_new_span():
    spans = logged(in_turn(("neural:5", 3, 64), ("neural:5", 3, 33), ("neural:5", 3, 32), ("neural:5", 3, 16)))
    assert [s.args["batch"] for s in spans[:-1]] == [[64, 33], [32, 32], [16, 16]]


def test_what_could_not_be_seen_has_no_span_of_its_own():
    parts = [part for _ in range(200) for part in (("neural:5", 16, 8), ("plain", 1, 8))]
    spans = logged(in_turn(*parts))
    assert len(spans) < 80, "one plain round in sixteen is no span once the rollout is long"
    rounds = sum(s.args["rounds"] + s.args.get("interludes", 0) for s in spans[:-1])
    assert rounds == 200 * 17
    assert sum(t.rounds for t in read_totals(spans) if t.strategy == "plain") == 200, "but it is counted"


def test_the_tail_is_where_fewer_than_a_quarter_decode():
    rollout = logged(in_turn(("neural:5", 10, 64), ("neural:5", 10, 16), ("plain", 10, 15), ("plain", 5, 1)))[-1]
    assert rollout.args["peak"] == 64 and rollout.args["tail_s"] == pytest.approx(0.15)


def test_sums_say_what_plain_decoding_would_have_needed():
    spans = logged(in_turn(("neural:5", 10, 5), ("plain", 4, 6)))
    by = {t.strategy: t for t in read_totals(spans)}
    assert by["neural:5"].bucket == by["plain"].bucket == 6
    assert by["neural:5"].plain_equivalent == pytest.approx(20) and by["neural:5"].tokens == 100
    assert by["plain"].median_s == pytest.approx(0.01) and by["plain"].seconds == pytest.approx(0.04)


def test_an_engine_that_did_nothing_writes_nothing():
    assert logged([]) == []


KINDS = st.sampled_from(["prefill", "plain", "neural:5", "suffix:3"])


@given(st.lists(st.tuples(KINDS, st.integers(1, 40), st.floats(1e-4, 0.1)), min_size=1, max_size=120))
def test_spans_cover_the_rollout_without_overlap(drawn):
    rounds, at = [], 0.0
    for strategy, batch, seconds in drawn:
        rounds.append(RoundRecord(at, seconds, batch, strategy, batch))
        at += seconds
    *spans, rollout = logged(rounds)
    assert all(a.end <= b.start + 1e-6 for a, b in itertools.pairwise(spans))
    assert spans[0].start == pytest.approx(rollout.start) and spans[-1].end == pytest.approx(rollout.end)
    assert sum(s.args["rounds"] + s.args.get("interludes", 0) for s in spans) == len(rounds)
    assert sum(s.args["tokens"] for s in spans) == sum(r.tokens for r in rounds)
    assert sum(t.rounds for t in read_totals([rollout])) == sum(r.strategy != "prefill" for r in rounds)


def test_batch_sizes_are_kept_apart_as_the_tuner_does():
    ladder = batch_ladder(512)
    assert sorted({bucket_of(n) for n in range(1, 513)}) == ladder
    assert [bucket_below(n) for n in ladder[1:]] == ladder[:-1] and [bucket_above(n) for n in ladder[:-1]] == ladder[1:]
    assert bucket_below(1) == 0
