"""benchmarks/equal_dice.py: it runs, and its standard errors are those of what it is given."""

from __future__ import annotations

import json
import random
import statistics
import sys
from pathlib import Path

import pytest

from paceline.evaluation.scores import EvalScores, PromptScores

from ..conftest import load_file

FILE = Path(__file__).parents[2] / "benchmarks" / "equal_dice.py"


def test_its_standard_errors_are_those_of_the_repeats():
    dice = random.Random(0)

    def repeat(rows: list[list[float]]) -> EvalScores:
        return EvalScores([PromptScores("countdown", row, [1, 1]) for row in rows], [1])

    later, earlier = [], []
    for _ in range(20):
        rows = [[float(dice.random() < 0.5) for _ in range(2)] for _ in range(30)]
        later.append(repeat(rows))
        earlier.append(repeat([[x if dice.random() < 0.95 else 1 - x for x in row] for row in rows]))
    row = load_file(FILE).compare(later, earlier)
    gaps = [a.value("mean") - b.value("mean") for a, b in zip(later, earlier, strict=True)]
    assert row["se_equal_dice"] == pytest.approx(statistics.stdev(gaps))
    assert row["same_reward"] == pytest.approx(0.95, abs=0.02)
    assert row["se_other_dice"] > 1.5 * row["se_equal_dice"]
    assert row["narrower_low"] < row["se_other_dice"] / row["se_equal_dice"] < row["narrower_high"]
    assert row["reported_se"] == pytest.approx(row["se_equal_dice"], rel=0.5)


def test_it_runs(monkeypatch, capsys):
    words = "--steps 1 --apart 1 --repeats 2 --prompts 2 --max-tokens 24 --train-prompts 2 --train-samples 2"
    monkeypatch.setattr(sys, "argv", ["equal_dice.py", *words.split()])
    load_file(FILE).main()
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["apart"] == 1 and row["pairs"] == 1 and 0 <= row["same_reward"] <= 1


def test_the_committed_result_says_at_least_twice():
    """Of neighbouring checkpoints, 20 repeats."""
    text = (FILE.parent / "results" / "equal-dice-cpu.txt").read_text()
    results = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert results and all(r["settings"]["repeats"] == 20 for r in results)
    assert all(r["rows"][0]["apart"] == 1 and r["rows"][0]["narrower"] >= 2 for r in results)
