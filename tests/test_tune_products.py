"""benchmarks/tune_products.py: what it tries, and that the table it writes is read as it was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.kernels.hopper.matmul import ROWS, Tile, read_tiles

from .conftest import load_file

FILE = Path(__file__).parents[1] / "benchmarks" / "tune_products.py"


@pytest.fixture(scope="module")
def tune():
    return load_file(FILE)


def test_splits_fill_the_card(tune):
    qkv, o, down = (4608, 3584), (3584, 3584), (3584, 18944)
    tile = Tile(64, 128)
    assert tune.splits_for(tile, *qkv, 132) == [2, 4, 5, 7, 10]
    assert tune.splits_for(tile, *o, 132) == [2, 5, 7, 10, 14]
    assert tune.splits_for(tile, *down, 132)[0] == 2
    assert tune.splits_for(Tile(64, 128, gated=True), 37888, 3584, 132) == [1]
    assert tune.splits_for(Tile(library=True), *down, 132) == [1]


def test_what_is_tried_fits_the_number_of_rows(tune):
    for rows in ROWS:
        tried = tune.tiles(rows, gated=False)
        assert tried and len(set(tried)) == len(tried)
        assert all(t.vector <= (rows == 1) for t in tried)
        assert any(t.library for t in tried) == (rows > 1) and not any(t.library for t in tune.tiles(rows, gated=True))


def test_a_library_has_to_be_faster_than_the_other(tune, monkeypatch, capsys):
    """A kernel of ours may take a little longer, since it overlaps with its neighbours; cuBLASLt does not."""
    library, own, took = Tile(library=True), Tile(64, 64), {None: 10.0}
    monkeypatch.setattr(tune, "tiles", lambda rows, gated: [own, library])
    monkeypatch.setattr(tune.Shape, "us", lambda self, rows, tile, repeat: took[tile])
    monkeypatch.setattr(tune, "splits_for", lambda *_: [1])

    def chosen(own_us: float, library_us: float) -> Tile | None:
        took.update({own: own_us, library: library_us})
        (row,) = tune.tune_shape(tune.Shape("tiny", "down"), [64], {}, 1e12, 1)
        return Tile(**row["tile"]) if row["used"] else None

    assert chosen(10.5, 10.2) == own and chosen(11.5, 10.2) is None
    assert chosen(10.5, 9.0) == library and chosen(10.0, 9.8) == own


def test_a_small_run(tune, tmp_path, monkeypatch, capsys):
    """Slowly, in the interpreter: one matrix unit's tile each way, one cut."""
    monkeypatch.setattr(tune, "FIRST", [(64, 64, 4, 2)])
    monkeypatch.setattr(tune, "SECOND", [])
    monkeypatch.setattr(tune, "VECTOR", [(16, 64, 4, 2)])
    monkeypatch.setattr(tune, "SPLITS", (1, 2))
    monkeypatch.setattr(tune, "CUTS", [tune.Cut()])
    monkeypatch.setattr(tune, "WAVES", (2,))
    monkeypatch.setattr(tune, "GAIN", 1e9)  # whatever the interpreter takes
    out = tmp_path / "tiles.json"
    tune.main(["--geometry", "tiny", "--rows", "1", "--attention", "1x1x20", "--workers", "0", "--out", str(out)])
    table = read_tiles(out)
    assert set(table) == {(1, 128, 64), (1, 64, 64), (1, 256, 64), (1, 64, 128), (1, 128, 128)}
    assert [t.gated for key, t in table.items() if key[1] == 256] == [True]
    assert "left out" not in capsys.readouterr().out


def test_other_numbers_of_rows_are_timed_as_the_table_has_them(tune, tmp_path, monkeypatch, capsys):
    """A tile is chosen for the most rows that it serves, and has to show what it does with fewer."""
    monkeypatch.setattr(tune, "tile_for", lambda rows, weight: Tile(library=True) if len(weight) == 128 else None)
    monkeypatch.setattr(tune, "SPLITS", ())
    out = tmp_path / "tiles.json"
    tune.main(["--geometry", "tiny", "--rows", "5", "--attention", "", "--workers", "0", "--out", str(out)])
    lines = [line for line in capsys.readouterr().out.splitlines() if " 5 rows" in line]
    assert [line.split()[1] for line in lines if "cuBLASLt" in line] == ["qkv", "draft"] and len(lines) == 5
    assert read_tiles(out) == {}
