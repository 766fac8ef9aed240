"""benchmarks/roofline.py runs the engine's own passes, and its floors are what they must read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .conftest import benchmark

roofline = benchmark("roofline")
CASES = ("cublas", "tiles", "pdl, 1 MB", "pdl, 8 MB")


def test_a_small_run(roofline, capsys):
    short = "--geometry tiny --device cpu --batch 1,3 --context 70 --verify 4 --long 150 --long-batch 2"
    summary = roofline.main(
        [*short.split(), "--draft-batch", "3", "--window", "16", "--repeat", "1", "--compare", "--prefetch", "1,8"]
    )
    assert [(r["pass"], r["batch"]) for r in summary["rows"]] == [
        ("decode", 1), ("verify 4 tokens", 1), ("verify tree 6x3/15", 1),
        ("decode", 3), ("verify 4 tokens", 3), ("verify tree 6x3/15", 3),
        ("decode", 2), ("verify 8 tokens", 2),
        ("decode, keeps features", 3), ("verify 8, keeps features", 3), ("draft 6, full, window 16", 3),
        *((f"{name} [{case}]", n) for case in CASES for n in (1, 3) for name in ("decode", "verify 8")),
    ]  # fmt: skip
    assert all(r["ms"] > 0 and r["floor_ms"] > 0 for r in summary["rows"])
    out = capsys.readouterr().out
    assert "x floor" in out and '"first_token_s"' in out.splitlines()[-1]


def test_the_floor_of_a_7b(roofline):
    """The figures of the geometry that bars are set for, worked out by hand."""
    with torch.device("meta"):
        model = roofline.Decoder(roofline.config_of("7b", 4096)).to(torch.bfloat16)
    floor = roofline.Floor(model, 4.25e12)
    assert floor.per_token == 2 * 28 * 4 * 128 * 2
    assert floor.weights / 1e9 == pytest.approx(14.14, abs=0.01)
    assert floor.step(1, 2048) == pytest.approx(3.36, abs=0.01)
    with torch.device("meta"):
        tied = roofline.Decoder(roofline.config_of("1.5b", 4096)).to(torch.bfloat16)
    assert roofline.Floor(tied, 4.25e12).weights / 1e9 == pytest.approx(3.09, abs=0.01), "its embeddings are its head"
    assert floor.step(32, 2048) == pytest.approx(4.21, abs=0.01)


def test_a_tied_model_keeps_one_matrix(roofline):
    model = roofline.make_model(roofline.config_of("tiny", 64), torch.device("cpu"))
    assert model.head.weight is not model.embed.weight
    tied = roofline.make_model(replace(model.config, tied=True), torch.device("cpu"))
    assert tied.head.weight is tied.embed.weight
