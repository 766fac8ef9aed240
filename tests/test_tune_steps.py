"""benchmarks/tune_steps.py: what it tries for a pass, what it keeps, and that the table it writes is read as meant."""

from __future__ import annotations

import json

import pytest

from paceline.kernels import paged_attention_triton as attention
from paceline.kernels.hopper import matmul
from paceline.kernels.hopper.matmul import ROW_BUCKETS, Tile, read_matmul_tiles

from .conftest import benchmark

tune_steps = benchmark("tune_steps")


@pytest.mark.parametrize("rows", ROW_BUCKETS)
def test_what_is_tried(tune_steps, rows):
    for part, shape in tune_steps.matrices(tune_steps.config_of("1.5b", 2048)).items():
        tried = tune_steps.candidates(part, rows, *shape, 132)
        assert tried and len(set(tried)) == len(tried)
        assert all(t.gated == (part == "gate_up") and t.vector == (rows == 1) for t in tried)
        assert any(t.norm for t in tried) == (rows == 1 and part in ("qkv", "gate_up"))


def test_what_is_faster_is_kept(tune_steps):
    cost = {Tile(1): 1.0, Tile(2): 0.9, Tile(3): 0.95, Tile(4): 0.8985, Tile(5): 0.5}
    timer = lambda a, b: tuple(sum(cost[t] for t in table.values()) for table in (a, b))  # noqa: E731
    cost |= {Tile(5, preload=True): 0.4}
    tried = [("o", (1, 8, 8), Tile(n)) for n in (1, 2, 3, 4)] + [
        ("down", (1, 8, 9), Tile(5)),
        ("down", (1, 8, 9), None),
        ("qkv", (1, 8, 7), None),
    ]
    cublaslt = Tile(cublaslt=True)
    cost |= {cublaslt: 0.3}
    table = {(1, 8, 8): Tile(1), (1, 8, 9): Tile(1), (1, 8, 7): cublaslt}
    tiles, log = tune_steps.descend(table, iter(tried), timer)
    assert tiles == table | {(1, 8, 8): Tile(2), (1, 8, 9): Tile(5, preload=True)}, "a gain that may be chance is none"
    assert len(log) == 5, "what is there already is not tried"


def test_a_small_run(tune_steps, tmp_path, monkeypatch, capsys):
    """In the interpreter, where nothing is gained: the procedure is what is tested."""
    monkeypatch.setattr(tune_steps, "NORMED", [(4, 4)])
    monkeypatch.setattr(tune_steps, "SINGLE_ROW", [])
    monkeypatch.setattr(tune_steps, "BLOCKS", [])
    monkeypatch.setattr(tune_steps, "CLEARLY", 0.0)
    monkeypatch.setattr(tune_steps, "attention_candidates", lambda name: [tune_steps.AttentionTile(block_n=16)])
    out, shipped, attended = tmp_path / "tiles.json", matmul.MATMUL_TILES, attention.ATTENTION_TILES
    words = ["--geometry", "tiny", "--rows", "1", "--context", "20", "--repeat", "1", "--workers", "0"]
    tune_steps.main([*words, "--out", str(out)])
    shown = capsys.readouterr().out
    result = json.loads(shown.splitlines()[-1])
    parts = [t["part"] for t in result["tried"]]
    assert parts == ["attention 16", "gate_up", "qkv"] and "left out" not in shown
    assert (shipped, attended) == (matmul.MATMUL_TILES, attention.ATTENTION_TILES), "as they were"
    assert shipped.items() <= read_matmul_tiles(out).items()
    assert attended.keys() == attention.read_attention_tiles(out).keys()
    tune_steps.main([*words, "--tiles", str(out), "--only", "qkv,o"])
    assert [t["part"] for t in json.loads(capsys.readouterr().out.splitlines()[-1])["tried"]] == ["qkv"]
