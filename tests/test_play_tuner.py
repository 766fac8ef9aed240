"""benchmarks/play_tuner.py plays whole rollouts with measured costs, and what the tuner reaches in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.draft.strategy import PLAIN, Strategy

from .conftest import benchmark

play_tuner = benchmark("play_tuner")
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


@pytest.mark.parametrize(("spread", "faster", "near"), [(0.0, 2.5, 0.84), (0.15, 1.7, 0.9)], ids=["alike", "different"])
def test_the_tuner_comes_near_one_that_knows_everything(play_tuner, capsys, spread, faster, near):
    words = ["--costs", str(COSTS), "--capture-ms", "0,160", "--steps", "6", "--repeat", "2", "--spread", str(spread)]
    r = play_tuner.main(words)
    free, dear = r["rows"]
    assert free["of_best"] > 0.95 and free["speedup"] > faster
    assert dear["of_best"] > near and dear["captures"] < free["captures"], "where graphs cost nothing there are more"
    assert dear["explored"] < 0.03 and dear["first_s"] > dear["capturing_s"] > 0
    assert all(row["plain"] < 0.2 for row in dear["by_texts"] if 1 < row["up_to"] < 128), "where guessing pays"
    out = capsys.readouterr().out
    assert "of the best" in out and "up to 64" in out


def test_where_all_texts_are_equally_long(play_tuner, capsys):
    words = ["--costs", str(COSTS), "--capture-ms", "0", "--steps", "4", "--repeat", "1", "--flat", "384"]
    (row,) = play_tuner.main([*words, "--context", "250", "--spread", "0.3"])["rows"]
    assert row["speedup"] > 0.97 and [r["up_to"] for r in row["by_texts"]][-1] == 128
