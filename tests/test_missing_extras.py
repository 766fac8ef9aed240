"""Without an optional package, what needs it ends with one sentence that names the extra, before any work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = {
    "ray": ("ray", ["cluster.backend=ray"]),
    "math_verify": ("math", ["reward.functions=[{function: math}]"]),
    "reasoning_gym": ("gym", ["task.name=gym:simple_equations"]),
    "datasets": ("hub", ["task.name=hub:some/data"]),
    "arch": ("forecast", ["task.name=forecast:sp500"]),
    "mcp": ("mcp", ["environment.mcp=[server]"]),
    "pandapower": ("grid", ["task.name=grid:screening"]),
    "wandb": ("track", ["log.wandb=project"]),
    "trackio": ("track", ["log.trackio=project"]),
}


SHORT = ("ray", "math_verify", "mcp", "wandb")
"""One of each kind of what needs a package; each takes a start of Python with torch."""


def without(package: str, folder: Path, *command: str) -> subprocess.CompletedProcess:
    """Run Python where this package cannot be imported, in processes that it starts neither."""
    missing = folder / "missing"
    missing.mkdir()
    (missing / f"{package}.py").write_text(f"raise ImportError(\"No module named '{package}'\")\n")
    path = os.pathsep.join(filter(None, [str(missing), *sys.path]))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("package", [p if p in SHORT else pytest.param(p, marks=pytest.mark.soak) for p in CASES])
def test_a_run_without_an_optional_package(package, tmp_path):
    extra, settings = CASES[package]
    small = ["steps=1", "rollout.prompts=2", "rollout.samples=2", "rollout.max_tokens=16"]
    done = without(package, tmp_path, "-m", "paceline", "train", *small, f"run_dir={tmp_path}/run", *settings)
    assert done.returncode == 2, done.stderr
    said = done.stderr.strip().splitlines()
    assert f"pip install 'paceline[{extra}]'" in said[-1]
    assert "Traceback" not in done.stderr + done.stdout
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_trl(tmp_path):
    lines = [
        "from paceline.errors import UserError",
        "try: import paceline.integrations.trl",
        "except UserError as err: print(err)",
    ]
    code = "\n".join(lines)
    done = without("trl", tmp_path, "-c", code)
    assert "pip install 'paceline[trl]'" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1
