"""benchmarks/draft_training.py: each way does as much work as it may, and says how far it came."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..conftest import load_file

FILE = Path(__file__).parents[2] / "benchmarks" / "draft_training.py"


def test_ways_with_the_same_work(monkeypatch, capsys):
    bench = load_file(FILE)
    monkeypatch.setattr(bench, "WAYS", [bench.Way(1024), bench.Way(256, 2, takes_after=True)])
    monkeypatch.setattr(sys, "argv", ["draft_training.py", "--tokens", "2000", "--answers", "24", "--max-tokens", "40"])
    bench.main()
    large, small = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert small["steps"] > 4 * large["steps"], "smaller, and cheaper in the first half"
    assert "2 draft tokens at first" in small["way"] and "from the last layer" in small["way"]
    for row in (large, small):
        assert row["tokens_per_check"] and all(1.0 <= n <= 8.0 for n in row["tokens_per_check"])
