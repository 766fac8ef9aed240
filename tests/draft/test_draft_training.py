"""benchmarks/draft_training.py: each variant does the same work, and prints the accept length that it reached."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..conftest import load_file

FILE = Path(__file__).parents[2] / "benchmarks" / "draft_training.py"


def test_variants_with_the_same_work(monkeypatch, capsys):
    bench = load_file(FILE)
    monkeypatch.setattr(bench, "VARIANTS", [bench.Variant(1024), bench.Variant(256, 2, from_last_layer=True)])
    monkeypatch.setattr(sys, "argv", ["draft_training.py", "--tokens", "2000", "--answers", "24", "--max-tokens", "40"])
    bench.main()
    large, small = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert small["steps"] > 4 * large["steps"], "smaller, and cheaper in the first half"
    assert "2 draft tokens at first" in small["variant"] and "from the last layer" in small["variant"]
    for row in (large, small):
        assert row["accept_length"] and all(1.0 <= n <= 8.0 for n in row["accept_length"])
