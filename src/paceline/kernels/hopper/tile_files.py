"""Tables of tiles as files: `tiles.json`, and those that benchmarks write and take with `--tiles`.

    {"device": ..., "tiles": [{"rows": 1, "out": 4608, "in": 3584, "tile": {...}}, ...], "attention": {"16": {...}}}

A tile has the fields that differ from their defaults. Files written before fields were renamed are read as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SECTIONS = {"cuts": "attention"}
"""The names that parts of a file had before."""
MATMUL_FIELDS = {"ahead": "preload", "added": "residual", "turns": "blocks", "library": "cublaslt"}
ATTENTION_FIELDS = {"most_m": "max_block_m", "most_splits": "max_splits"}
ATTENTION_NAMES = {"crowded": "large_batch", "lone": "small_batch"}


def read_tile_file(file: Path) -> dict[str, Any]:
    """Its content under the names of today; of a file without tiles for attention, "attention" is empty."""
    content = _renamed(json.loads(file.read_text()), SECTIONS)
    matmuls = [entry | {"tile": _renamed(entry["tile"], MATMUL_FIELDS)} for entry in content["tiles"]]
    by_name = _renamed(content.get("attention", {}), ATTENTION_NAMES)
    attention = {name: _renamed(tile, ATTENTION_FIELDS) for name, tile in by_name.items()}
    return content | {"tiles": matmuls, "attention": attention}


def _renamed(fields: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in fields.items()}
