"""What a rollout compiles stays bounded, and compiles: for an H200, on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks/compile_time.py"


def run(*words: str) -> dict:
    """In a process of its own: here kernels run in Triton's interpreter, which compiles nothing."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(SCRIPT), *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_few_variants_of_each_kernel():
    """One more is a second more that the first rollout on a machine waits: batch sizes and strategies add none."""
    r = run("--geometry", "7b", "--max-batch", "128")
    assert r["variants"] <= 72 and r["by_kernel"]["paged_attention._attend"] <= 14


@pytest.mark.parametrize("geometry", ["100m", pytest.param("7b", marks=pytest.mark.soak)])
def test_kernels_compile(geometry):
    r = run("--geometry", geometry, "--max-batch", "1", "--compile")
    assert r["seconds_by_kernel"].keys() == r["by_kernel"].keys()
    assert all(seconds > 0 for seconds in r["seconds_by_kernel"].values())
