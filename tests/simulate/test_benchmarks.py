"""The simulator's benchmarks run, and the published table is met."""

from __future__ import annotations

import json

from ..conftest import benchmark

simulate_nodes = benchmark("simulate_nodes")
simulate_runs = benchmark("simulate_runs")


def test_published_speedups_by_nodes(simulate_nodes, capsys):
    found = simulate_nodes.main(["--steps", "2", "--gpus", "8"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert [row["nodes"] for row in found["nodes"]] == [1, 2, 4, 8]
    assert all(abs(row["simulated"] / row["published"] - 1) < 0.15 for row in found["nodes"])
    assert len(found["techniques"]) == 5


def test_real_runs_beside_their_simulation(simulate_runs, capsys):
    words = ["rollout.prompts=2", "rollout.samples=4", "rollout.max_tokens=80", "log.tensorboard=false"]
    words.append("speculation.explore=0.3")  # so few rounds have plain ones among them, to compare with
    settings = [word for setting in words for word in ("--set", setting)]
    found = simulate_runs.main(["--workers", "1", "--steps", "3", *settings])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    row = found["rows"][0]
    assert row["workers"] == 1 and row["measured"]["dry"] == row["simulated"]["dry"] == 0.0
    assert row["measured"]["step_s"] > 0 and row["simulated"]["step_s"] > 0
