"""benchmarks/tune_products.py: what it tries, and that the table it writes is read as it was meant."""

from __future__ import annotations

from paceline.kernels.hopper.matmul import ROW_BUCKETS, Tile, read_matmul_tiles

from .conftest import benchmark

tune_products = benchmark("tune_products")


def test_splits_fill_the_card(tune_products):
    qkv, o, down = (4608, 3584), (3584, 3584), (3584, 18944)
    tile = Tile(64, 128)
    assert tune_products.splits_for(tile, *qkv, 132) == [2, 4, 5, 7, 10]
    assert tune_products.splits_for(tile, *o, 132) == [2, 5, 7, 10, 14]
    assert tune_products.splits_for(tile, *down, 132)[0] == 2
    assert tune_products.splits_for(Tile(64, 128, gated=True), 37888, 3584, 132) == [1]
    assert tune_products.splits_for(Tile(cublaslt=True), *down, 132) == [1]


def test_what_is_tried_fits_the_number_of_rows(tune_products):
    for rows in ROW_BUCKETS:
        tried = tune_products.tiles(rows, gated=False)
        assert tried and len(set(tried)) == len(tried)
        assert all(t.vector <= (rows == 1) for t in tried)
        assert any(t.cublaslt for t in tried) == (rows > 1) and not any(
            t.cublaslt for t in tune_products.tiles(rows, gated=True)
        )


def test_cublaslt_has_to_be_faster_than_cublas(tune_products, monkeypatch, capsys):
    """A kernel of ours may take a little longer, since it overlaps with its neighbours; cuBLASLt does not."""
    cublaslt, own, took = Tile(cublaslt=True), Tile(64, 64), {None: 10.0}
    monkeypatch.setattr(tune_products, "tiles", lambda rows, gated: [own, cublaslt])
    monkeypatch.setattr(tune_products.Shape, "us", lambda self, rows, tile, repeat: took[tile])
    monkeypatch.setattr(tune_products, "splits_for", lambda *_: [1])

    def chosen(own_us: float, cublaslt_us: float) -> Tile | None:
        took.update({own: own_us, cublaslt: cublaslt_us})
        (row,) = tune_products.tune_shape(tune_products.Shape("tiny", "down"), [64], {}, 1e12, 1)
        return Tile(**row["tile"]) if row["used"] else None

    assert chosen(10.5, 10.2) == own and chosen(11.5, 10.2) is None
    assert chosen(10.5, 9.0) == cublaslt and chosen(10.0, 9.8) == own


def test_a_small_run(tune_products, tmp_path, monkeypatch, capsys):
    """Slowly, in the interpreter: one tile with tensor cores, one without, one of attention."""
    monkeypatch.setattr(tune_products, "FIRST", [(64, 64, 4, 2)])
    monkeypatch.setattr(tune_products, "SECOND", [])
    monkeypatch.setattr(tune_products, "VECTOR", [(16, 64, 4, 2)])
    monkeypatch.setattr(tune_products, "SPLITS", (1, 2))
    monkeypatch.setattr(tune_products, "ATTENTION_CANDIDATES", [tune_products.AttentionTile()])
    monkeypatch.setattr(tune_products, "WAVES", (2,))
    monkeypatch.setattr(tune_products, "GAIN", 1e9)  # whatever the interpreter takes
    out = tmp_path / "tiles.json"
    tune_products.main(
        ["--geometry", "tiny", "--rows", "1", "--attention", "1x1x20", "--workers", "0", "--out", str(out)]
    )
    table = read_matmul_tiles(out)
    assert set(table) == {(1, 128, 64), (1, 64, 64), (1, 256, 64), (1, 64, 128), (1, 128, 128)}
    assert [t.gated for key, t in table.items() if key[1] == 256] == [True]
    assert "left out" not in capsys.readouterr().out


def test_other_numbers_of_rows_are_timed_as_the_table_has_them(tune_products, tmp_path, monkeypatch, capsys):
    """A tile is chosen for the most rows that it serves, and has to show what it does with fewer."""
    monkeypatch.setattr(
        tune_products, "tile_for", lambda rows, weight: Tile(cublaslt=True) if len(weight) == 128 else None
    )
    monkeypatch.setattr(tune_products, "SPLITS", ())
    out = tmp_path / "tiles.json"
    tune_products.main(["--geometry", "tiny", "--rows", "5", "--attention", "", "--workers", "0", "--out", str(out)])
    lines = [line for line in capsys.readouterr().out.splitlines() if " 5 rows" in line]
    assert [line.split()[1] for line in lines if "cuBLASLt" in line] == ["qkv", "draft"] and len(lines) == 5
    assert read_matmul_tiles(out) == {}
