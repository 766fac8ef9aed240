"""benchmarks/measure_h200.py runs what the docs' figures come from, and keeps what it printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import benchmark

measure_h200 = benchmark("measure_h200")
RESULTS = Path(__file__).parents[1] / "benchmarks/results"


def test_parts_are_run_in_the_order_that_suits_them(measure_h200):
    names = [part.name for part in measure_h200.chosen("rl-step-7b-flat,grown,rl-step-7b")]
    assert names == ["grown", "rl-step-7b", "rl-step-7b-flat"]
    assert measure_h200.chosen(None) == measure_h200.PARTS
    with pytest.raises(SystemExit, match="no part is called flatt; there are roofline-7b, "):
        measure_h200.chosen("flatt,grown")


def test_kept_results_were_made_by_these_commands(measure_h200):
    kept = [p for p in measure_h200.PARTS if (RESULTS / f"{p.name}-h200.txt").exists()]
    assert len(kept) == 6
    for part in kept:
        with (RESULTS / f"{part.name}-h200.txt").open(encoding="utf-8") as file:
            assert file.readline().startswith(f"# {part.command.replace('{out}/', '')}   (NVIDIA H200)"), part.name


def test_what_a_part_prints_is_kept_and_a_failure_stops_nothing(measure_h200, tmp_path, monkeypatch, capsys):
    parts = [
        measure_h200.Part("broken", "python -c 'raise SystemExit(\"no such card\")'"),
        measure_h200.Part("made", "python -c 'import pathlib; pathlib.Path(\"{out}/there\").mkdir()'", "{out}/there"),
        measure_h200.Part("named", "python -c 'print(\"{out}/DEEP\")'"),
        measure_h200.Part("fine", "python benchmarks/measure_h200.py --list --parts grown"),
    ]
    monkeypatch.setattr(measure_h200, "PARTS", parts)
    for _ in range(2):  # what is made once need not be made again
        with pytest.raises(SystemExit, match="1"):
            measure_h200.main(["--out", str(tmp_path)])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [p["rc"] for p in last["parts"]] == [1, 0, 0, 0] and last["parts"][1]["seconds"] == 0
    assert "no such card" in (tmp_path / "broken-h200.txt").read_text()
    head, line = (tmp_path / "fine-h200.txt").read_text().splitlines()
    assert head.startswith("# python benchmarks/measure_h200.py --list") and "--grow 7b" in line
    head, line = (tmp_path / "named-h200.txt").read_text().splitlines()
    assert head.startswith("# python -c 'print(\"DEEP\")'   (") and line == "DEEP"
