"""benchmarks/spot_buffer.py: each variant keeps what it says within the same capacity, and is evaluated
where it says."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from ..conftest import load_file

FILE = Path(__file__).parents[2] / "benchmarks" / "spot_buffer.py"


@pytest.mark.parametrize(
    "keep", ["shortest", "longest", "random", "longest and random", "buffer, longest only", "buffer, any length"]
)
def test_every_variant_stays_within_the_capacity(keep):
    rng = random.Random(0)
    sequences = [([rng.randrange(99) for _ in range(10 + 3 * i)], 5) for i in range(60)]
    kept = [len(tokens) for tokens, _ in load_file(FILE).choose(sequences, 900, keep, rng)]
    assert 600 < sum(kept) <= 900
    if keep != "random":
        assert (max(kept) == max(len(tokens) for tokens, _ in sequences)) == (keep != "shortest"), kept


def test_it_says_how_far_each_variant_came(monkeypatch, capsys):
    words = "--answers 16 --samples 2 --max-tokens 40 --steps 1 --updates 2 --step-tokens 128 --share 0.5 --seeds 1"
    monkeypatch.setattr(sys, "argv", ["spot_buffer.py", *words.split(), "--variants", "0", "5"])
    load_file(FILE).main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["keeps"] for row in said["rows"]] == ["shortest", "buffer, longest only"]
    assert all(row["accept_length"][0] > 1 for row in said["rows"]) and said["settings"]["share"] == 0.5
