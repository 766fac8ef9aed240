"""Tables of tiles given with `--tiles`: those written before fields were renamed mean the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paceline.kernels.hopper import matmul
from paceline.kernels.hopper.matmul import TILES_FILE, Tile, read_matmul_tiles

from ..conftest import benchmark

passes = benchmark("passes")
FORMER = {
    "preload": "ahead", "residual": "added", "blocks": "turns", "cublaslt": "library", "attention": "cuts",
    "max_block_m": "most_m", "max_splits": "most_splits", "large_batch": "crowded", "small_batch": "lone",
}  # fmt: skip


@pytest.fixture
def attention(monkeypatch):
    module = pytest.importorskip("paceline.kernels.paged_attention_triton", reason="needs triton")
    monkeypatch.setattr(module, "ATTENTION_TILES", module.ATTENTION_TILES)
    monkeypatch.setattr(matmul, "MATMUL_TILES", matmul.MATMUL_TILES)
    return module


def test_the_shipped_table_under_its_former_names(passes, attention, tmp_path):
    text = TILES_FILE.read_text()
    for name, former in FORMER.items():
        assert f'"{name}"' in text or name == "max_block_m"
        text = text.replace(f'"{name}"', f'"{former}"')
    old = tmp_path / "tiles.json"
    old.write_text(text)
    shipped = (matmul.MATMUL_TILES, attention.ATTENTION_TILES)
    matmul.MATMUL_TILES = {}
    passes.use_table(str(old))
    assert shipped[0] == matmul.MATMUL_TILES
    assert shipped[1] == attention.ATTENTION_TILES


def test_a_table_that_leaves_attention_out_keeps_what_was_shipped(passes, attention, tmp_path):
    old = tmp_path / "tiles.json"
    tile = {"block_n": 32, "ahead": True}
    old.write_text(json.dumps({"device": "H200", "tiles": [{"rows": 8, "out": 64, "in": 128, "tile": tile}]}))
    shipped = dict(attention.ATTENTION_TILES)
    passes.use_table(str(old))
    assert matmul.MATMUL_TILES == {(8, 64, 128): Tile(32, preload=True)} == read_matmul_tiles(old)
    assert shipped == attention.ATTENTION_TILES

    old.write_text(json.dumps({"tiles": [], "cuts": {"crowded": {"most_m": 16, "most_splits": 4}}}))
    passes.use_table(str(old))
    new = replace(attention.AttentionTile(), max_block_m=16, max_splits=4)
    assert shipped | {"large_batch": new} == attention.ATTENTION_TILES
