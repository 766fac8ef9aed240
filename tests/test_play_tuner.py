"""benchmarks/play_tuner.py plays whole rollouts with measured costs, and what the tuner reaches in them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.draft import tuner
from paceline.draft.strategy import PLAIN, Strategy

from .conftest import benchmark

play_tuner = benchmark("play_tuner")
ablate_tuner = benchmark("ablate_tuner")
COSTS = Path(__file__).parents[1] / "benchmarks/results/roofline-7b-wide-h200.txt"


def test_the_costs_of_an_h200(play_tuner):
    assert play_tuner.between([(1, 4.0), (8, 7.0)], 2) == pytest.approx(5.0)
    assert play_tuner.between([(1, 4.0), (8, 7.0)], 16) == 14.0 and play_tuner.between([(2, 4.0)], 1) == 4.0
    rows = [
        {"pass": "decode", "batch": 2, "context": 2048, "ms": 4.0},
        {"pass": "decode", "batch": 2, "context": 16384, "ms": 99.0},
        {"pass": "verify 4 tokens", "batch": 2, "context": 2048, "ms": 5.0},
        {"pass": "verify tree 6x3/15", "batch": 2, "context": 2048, "ms": 99.0},
        {"pass": "draft 6, full, window 512", "batch": 2, "context": 2048, "ms": 99.0},
        {"pass": "draft 6, 32768, window 512", "batch": 2, "context": 2048, "ms": 1.2},
    ]
    machine = play_tuner.Machine.of(rows)
    assert machine.seconds(2, PLAIN) == pytest.approx(0.004)
    assert machine.seconds(2, Strategy.parse("neural:3")) == pytest.approx(0.0056)
    assert machine.seconds(2, Strategy.parse("suffix:3")) == pytest.approx(0.0051)
    rows += [{"pass": "decode", "batch": 8, "context": n, "ms": ms} for n, ms in ((2048, 6.0), (4096, 8.0))]
    shorter = play_tuner.Machine.of(rows, context=1024)  # a text takes 1 ms more for every 8,192 tokens of it
    assert shorter.seconds(2, PLAIN) == pytest.approx(0.00375)
    assert shorter.seconds(2, Strategy.parse("neural:3")) == pytest.approx(0.00535)


def test_drawn_drafts_are_accepted_as_often_as_expected(play_tuner):
    s, rng = Strategy.parse("neural:5"), np.random.default_rng(0)
    batch = play_tuner.Batch([1000] * 4000, [0.0] * 3999 + [-1.0], 0.0)
    batch.written += play_tuner.EARLY
    accepted = batch.draw(s, rng)
    rates = 0.87 - 0.005 * np.arange(5)
    assert batch.expected(s)[0] == pytest.approx(1 + np.cumprod(rates).sum())
    assert 1 + accepted[:-1].mean() == pytest.approx(batch.expected(s)[0], rel=0.02) and accepted[-1] == 0
    assert batch.draw(PLAIN, rng).sum() == 0 and (batch.expected(PLAIN) == 1).all()
    early = play_tuner.Batch([1000], [0.0], 0.0)
    assert early.expected(s)[0] < batch.expected(s)[0], "at the beginning"


def test_sequences_end_and_a_drafter_falls_behind(play_tuner):
    batch = play_tuner.Batch([3, 40, 40], [0.0, 0.1, 0.2], 0.0)
    assert batch.size == 3 and batch.catch_up_rows() == 0
    batch.write(np.array([4, 1, 2]), PLAIN)
    assert len(batch) == 2 and batch.left.tolist() == [39, 38] and batch.ease.tolist() == [0.1, 0.2]
    for _ in range(20):
        batch.write(np.array([1, 1]), PLAIN)
    assert batch.catch_up_rows() > 0
    batch.write(np.array([3, 3]), Strategy.parse("neural:3"))
    assert batch.catch_up_rows() == 0


def test_plain_decoding_ends_with_the_longest_sequence(play_tuner):
    machine = play_tuner.Machine([(1, 4.0), (2, 5.0)], [(1, 4.0)], [(1, 1.0)])
    assert play_tuner.plain_s(machine, [10, 30]) == pytest.approx((10 * 5e-3 + 20 * 4e-3) * 1.015)


def test_the_best_in_hindsight_is_never_slower_than_plain_decoding(play_tuner):
    rows = json.loads(COSTS.read_text().splitlines()[-1])["rows"]
    case = play_tuner.Case(accept=0.3, flat=64, context=250)
    machine = play_tuner.Machine.of(rows, 250)
    plain = sum(play_tuner.plain_s(machine, drawn) for drawn, _, _ in play_tuner.steps_of(case, 0, 2)[1:])
    assert play_tuner.best_s(machine, case, 0, 2) <= plain


def test_the_tuner_comes_near_the_best_in_hindsight(play_tuner, capsys):
    words = ["--costs", str(COSTS), "--steps", "5", "--seeds", "1"]
    cases = {"tail": 1.5, "tail-alike": 2.3, "tail-mixed": 1.1, "tail-drift": 1.2}
    r = play_tuner.main([*words, "--cases", ",".join(cases)])
    assert [row["case"] for row in r["rows"]] == list(cases)
    for row in r["rows"]:
        assert row["of_best"] > 0.93 and row["speedup"] > cases[row["case"]] and 0 < row["explored"] < 0.025
    out = capsys.readouterr().out.splitlines()
    assert "of the best" in out[0] and len(out) == 2 + len(cases) and json.loads(out[-1]) == r


def test_where_all_sequences_are_equally_long(play_tuner):
    words = ["--costs", str(COSTS), "--steps", "10", "--seeds", "1", "--cases", "flat-weak,flat-mixed"]
    assert all(row["median"] > 0.97 for row in play_tuner.main(words)["rows"])


def test_parts_are_left_out_one_by_one(ablate_tuner, capsys):
    words = ["--costs", str(COSTS), "--steps", "3", "--seeds", "1", "--cases", "flat-mixed"]
    r = ablate_tuner.main(words)
    assert [one["variant"] for one in r["variants"]] == list(ablate_tuner.VARIANTS)
    shares = {one["variant"]: one["rows"][0]["of_best"] for one in r["variants"]}
    assert shares["no margin"] < shares["as it is"] and tuner.MARGIN < 1, "numbers are put back"
    assert "flat step" in capsys.readouterr().out
