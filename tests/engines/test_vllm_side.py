"""benchmarks/vllm_side.py with vLLM on a CPU: the sides that it has on a GPU, on a small work."""

from __future__ import annotations

import json

import pytest

from ..conftest import benchmark
from ..test_vllm_side import SMALL
from .test_vllm import PYTHON

pytestmark = pytest.mark.vllm
vllm_side = benchmark("vllm_side")


def test_all_sides(vllm_side, tmp_path, capsys):
    words = [*SMALL, "--out", str(tmp_path), "--vllm-python", str(PYTHON), "--static", "5"]
    result = vllm_side.main(words)
    print(capsys.readouterr().out)
    assert result["starts"].keys() == {"ours", "adaptive", "vllm", "vllm:5", "tuned"}
    rows = {(row["side"], row["part"]): row for row in result["rows"]}
    assert rows["vllm", "tail"]["accept_length"] is None and rows["vllm:5", "tail"]["accept_length"] > 2
    assert {part for ratio in result["ratios"].values() for part in ratio} == {"1", "3", "tail"}
    steps = json.loads((tmp_path / "side-tuned.json").read_text())["tuner"]["steps_by_depth"]
    assert len(steps) > 2, "depths were tried"
