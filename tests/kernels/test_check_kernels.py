"""benchmarks/check_kernels.py runs every kernel, and notices one that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.kernels import move_kv_triton

from ..conftest import load_file

FILE = Path(__file__).parents[2] / "benchmarks" / "check_kernels.py"


@pytest.fixture(scope="module")
def check():
    return load_file(FILE)


def test_a_wrong_kernel_is_noticed(check, monkeypatch, capsys):
    assert check.main(["--rounds", "1"]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["worst"]) == len(check.NAMES)
    monkeypatch.setattr(move_kv_triton, "move_accepted_kv", lambda *args: None)
    assert check.main(["--rounds", "3", "--only", "move_kv"]) == 1
    assert "move_kv       torch.float32" in capsys.readouterr().out
