"""What benchmarks/rl_step.py measures, on the embedded model, and what it makes of it."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.observe.energy import EnergyMeter, spent

from .conftest import benchmark

rl_step, peers = benchmark("rl_step"), benchmark("peers")


def run(module, monkeypatch, capsys, *words: object) -> dict:
    monkeypatch.setattr("sys.argv", [f"{module.__name__}.py", *map(str, words)])
    module.main()
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_steps_of_both_ways(rl_step, monkeypatch, capsys):
    small = ["--prompts", 2, "--samples", 2, "--set", "model.dtype=float64"]
    r = run(rl_step, monkeypatch, capsys, "--steps", 2, "--max-tokens", 60, "--difficulty", "medium", *small)
    assert r["steps"] == 2 and len(r["rows"]) == 3, "one more, before them"
    assert r["identical"] == r["responses"] == 12 and r["reward_gap"] == 0.0 == r["reward_gap_error"]
    assert r["better"] == r["worse"] == 0
    assert r["step_speedup_range"][0] <= r["step_speedup"] <= r["step_speedup_range"][1]
    row = r["rows"][1]
    assert (
        row["rest_s"] >= row["timing_s/update_actor"] - 1e-3 > 0 and row["tokens"]["plain"] == row["tokens"]["adaptive"]
    )
    most = max(r["requests"], key=lambda row: row["seconds"]["plain"])
    assert 0 < sum(row["seconds"]["plain"] for row in r["requests"]) < r["rollout_s"]["plain"] and most["up_to"] <= 4
    assert sum(r["shares"].values()) == pytest.approx(1.0, abs=0.01) and r["first_token_s"] >= r["ready_s"] > 0
    assert r["plan_gb"]["weights"] > 0 and r["joules_per_step"] == {"plain": None, "adaptive": None}


def test_how_fast_updates_are(rl_step):
    from paceline.commands.compared import ComparedStep

    steps = [
        ComparedStep({}, metrics={"actor/tokens": n, "timing_s/update_actor": t})
        for n, t in ((9, 9.0), (10, 2), (20, 4))
    ]
    speed = rl_step.update_speed(steps, 1000, 1e5)
    assert speed == {"tokens": 15, "flop_s": 30_000.0, "product_flop_s": 1e5, "share": 0.3}, "without the first"


def test_answers_of_one_length(rl_step, monkeypatch, capsys):
    r = run(rl_step, monkeypatch, capsys, "--steps", 1, "--flat", 24, "--prompts", 2, "--samples", 2)
    assert r["tail"] == 1.0 and {row["response_length/mean"] for row in r["rows"]} == {24.0}


def test_the_summary_of_recorded_steps(rl_step):
    from paceline.commands.compared import ComparedStep, ModeRollout

    metrics = {"response_length/p50": 100.0, "response_length/p99": 1000.0, "rollout/spec_accept_length": 5.0,
               "timing_s/update_actor": 2.0, "rollout/share/plain": 0.5, "rollout/share/verify": 0.5}  # fmt: skip
    steps = [
        ComparedStep(
            {
                "plain": ModeRollout(slow, 0.5, 0.5, [3, 9], 900.0),
                "adaptive": ModeRollout(2.0, 1.0, 0.5 + gap, [4, 5], 300.0),
            },
            better=int(gap > 0),
            worse=2 * int(gap < 0),
            rest_s=3.0,
            rest_joules=100.0,
            metrics=metrics,
        )
        for slow, gap in ((90.0, 0.1), (10.0, -0.1), (12.0, 0.0))
    ]
    s = rl_step.summarize(steps)
    # 10 + 3 - 1 + 0.5 and 12 + 3 - 1 + 0.5 against 2 + 3; the first step is left out.
    assert s["step_speedup"] == 2.7 and s["step_speedup_range"] == [2.5, 2.9] and s["steps"] == 2
    assert s["reward_gap"] == 0.0 and s["reward_gap_error"] == pytest.approx(0.1 / 3**0.5, abs=1e-3)
    assert s["better"] == 1 and s["worse"] == 2
    assert s["joules_per_step"] == {"plain": 1000.0, "adaptive": 400.0} and s["tail"] == 10.0
    assert s["longest"] == {"plain": 9, "adaptive": 5} and s["tokens"] == {"plain": 12, "adaptive": 9}


def test_answers_that_got_more_and_less_reward():
    from paceline.commands.compared import better_and_worse
    from paceline.core import Group, Sample

    plain, adaptive = (
        [Group(Sample(0, "?"), (1,), rewards=dict(enumerate(some))) for some in rewards]
        for rewards in (([1.0, 0.0, 0.5], [1.0, 1.0]), ([1.0, 0.5, 1.0], [0.0, 1.0]))
    )
    assert better_and_worse(plain, adaptive) == (2, 1) and better_and_worse(plain, plain) == (0, 0)


def test_where_the_time_goes_by_requests(rl_step):
    from paceline.rollout.stats import RoundRecord

    plain = [
        RoundRecord(0.0, 1.0, 8, "plain", 8),
        RoundRecord(1.0, 0.5, 5, "plain", 5),
        RoundRecord(2.0, 0.25, 1, "plain", 1),
    ]
    few = [RoundRecord(i, 0.1, 1, "neural:3", 3) for i in range(4)] + [RoundRecord(5.0, 2.1, 1, "neural:3", 4)]
    adaptive = [RoundRecord(0.0, 9.0, 8, "prefill", 8), RoundRecord(9.0, 1.0, 7, "plain", 7), *few]
    one, eight = rl_step.by_requests({"plain": plain, "adaptive": adaptive}, 2)
    assert eight == {"up_to": 8, "seconds": {"plain": 0.75, "adaptive": 0.5}, "unusual_s": 0.0,
                     "tokens_per_round": 1.0, "mostly": "plain"}  # fmt: skip
    assert one == {"up_to": 1, "seconds": {"plain": 0.125, "adaptive": 1.25}, "unusual_s": 1.0,
                   "tokens_per_round": 3.2, "mostly": "neural:3"}  # fmt: skip


def test_peers_write_as_much_and_are_stopped(peers, monkeypatch, capsys):
    small = ["--prompts", 2, "--samples", 2, "--max-tokens", 40, "--difficulty", "medium", "--repeat", 1]
    r = run(peers, monkeypatch, capsys, *small, "--cap", 60)
    for peer in r["peers"].values():
        assert peer["finished"] and peer["tokens"] == r["tokens"] == r["ours"]["plain"]["tokens"]
        assert peer["ratio_plain"] == pytest.approx(peer["seconds"] / r["ours"]["plain"]["seconds"], rel=0.1)
    stopped = run(peers, monkeypatch, capsys, *small, "--cap", 0.0001, "--peers", "generate")["peers"]["generate"]
    assert not stopped["finished"] and stopped["steps"] == 1 and stopped["would_take_s"] >= 0


def test_energy_is_counted_or_unknown():
    assert EnergyMeter(torch.device("cpu")).joules() is None
    assert spent(None, 3.0) is None and spent(3.0, None) is None and spent(3.0, 5.0) == 2.0


@pytest.mark.gpu
def test_energy_of_a_gpu():
    meter = EnergyMeter(torch.device("cuda"))
    before = meter.joules()
    x = torch.randn(8192, 8192, device="cuda")
    for _ in range(200):
        x = (x @ x).clamp(-1, 1)
    torch.cuda.synchronize()
    used = spent(before, meter.joules())
    assert used is None or used > 0
