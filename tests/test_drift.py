"""What benchmarks/drift.py makes of the runs that it has recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import load_file

FILE = Path(__file__).parents[1] / "benchmarks" / "drift.py"


@pytest.fixture(scope="module")
def drift():
    return load_file(FILE)


def recorded(steps: int, rollout_s: float, training_s: float = 0.0):
    """A run whose reward rises, with a slow first step."""
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "critic/rewards/mean": step / 100,
            "response_length/mean": 100.0,
            "rollout/spec_accept_length": 3.0,
            "timing_s/gen": rollout_s + (9.0 if step == 1 else 0.0),
            "rollout/tok_s": 1000.0 / rollout_s,
            "timing_s/step": 2 * rollout_s + training_s,
        }
        yield row | ({"timing_s/train_drafter": training_s} if training_s else {})


def test_the_summary_of_four_runs(drift, capsys):
    arms = {
        "none": list(recorded(40, 2.0)),
        "cold-adaptive": list(recorded(40, 1.0, 0.2)),
        "warm-frozen": list(recorded(40, 0.8)),
        "warm-adaptive": list(recorded(30, 0.5, 0.2)),  # its time was over
    }
    probes = {
        "cold-adaptive": {0: 1.0, 10: 2.0, 20: 4.1, 30: 4.2, 40: 1.0},
        "warm-frozen": {0: 4.5, 10: 4.2, 20: 4.0, 30: 3.9, 40: 3.8},
        "warm, as begun": {0: 4.5, 10: 4.65, 20: 4.2, 30: 4.1},
        "warm-adaptive": {0: 4.5, 10: 4.6, 20: 4.7, 30: 4.8},
    }
    s = drift.summarize(arms, probes)
    assert s["steps"] == 30, "those that all of them made"
    assert s["warm_adaptive_best_from"] == 10 and s["cold_passes_frozen_at"] == 20
    assert s["ahead_of_its_first_from"] == 20
    best = s["arms"]["warm-adaptive"]
    assert best["speedup_late"] == best["speedup_per_token_late"] == 4.0
    assert best["step_speedup_late"] == pytest.approx(4 / 1.2, abs=0.01) and best["drafter_s_per_step"] == 0.2
    assert s["arms"]["none"]["rollout_s"] == 69.0 and s["arms"]["none"]["rollout_s_late"] == 40.0
    quarters = s["arms"]["none"]["reward_by_quarter"]
    assert len(quarters) == 4 and quarters == sorted(quarters)
    drift.print_tables(arms, probes, 10)
    drift.print_summary(s)
    shown = capsys.readouterr().out
    assert "4.00 times as fast as with none" in shown and "stays above warm-frozen from step 20" in shown


def test_who_is_ahead_at_the_end(drift):
    assert drift.stays_ahead({0: 1.0, 5: 3.0, 10: 2.0}, [{0: 2.0, 5: 2.0, 10: 2.5}], 10) is None
    assert drift.stays_ahead({0: 1.0, 5: 3.0, 10: 2.0}, [{0: 2.0, 5: 2.0, 10: 2.5}], 5) == 5
    assert drift.by_quarter([1, 2, 3, 4, 5, 6, 7, 8]) == [1.5, 3.5, 5.5, 7.5]


def test_arms_differ_in_nothing_but_the_drafter(drift, monkeypatch):
    monkeypatch.setattr("sys.argv", ["drift.py", "--steps", "7", "--lr", "3e-4", "--set", "rollout.top_k=5"])
    args = drift.parse()
    configs = {name: drift.settings_of(args, name) for name in drift.ARMS}
    for name, config in configs.items():
        assert config.steps == 7 and config.learn.lr == 3e-4 and config.rollout.top_k == 5
        assert not config.speculation.suffix and config.spot.when == ("update" if "adaptive" in name else "off")
    same = [c.model_dump(exclude={"run_dir", "speculation", "spot"}) for c in configs.values()]
    assert all(c == same[0] for c in same)
