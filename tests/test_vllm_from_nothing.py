"""What benchmarks/vllm_from_nothing.py makes of two engines' rounds; the engines themselves need vLLM."""

from __future__ import annotations

import json

from .conftest import benchmark

vllm_from_nothing = benchmark("vllm_from_nothing")


def rows(seconds: list[float], **more: float) -> list[dict[str, float]]:
    return [{"seconds": s, "tokens": 100, "accept_length": 1.0} | more for s in seconds]


def test_it_is_ahead_from_the_round_after_which_its_total_stays_below(vllm_from_nothing, capsys, tmp_path):
    args = vllm_from_nothing.parse(["--rounds", "5", "--out", str(tmp_path / "out.json")])
    plain = rows([10.0] * 5)
    follow = rows([14.0, 9.0, 6.0, 5.0, 5.0], overdrawn=0.5)
    vllm_from_nothing.report(args, plain, follow)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ahead_from_round"] == 4, "totals 14.5, 24, 30.5, 36, 41.5 against 10, 20, 30, 40, 50"
    assert result["speed_up"] == round(50 / 41.5, 3)
    assert json.loads((tmp_path / "out.json").read_text()) == result
    vllm_from_nothing.report(args, plain, rows([12.0] * 5, overdrawn=0.0))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ahead_from_round"] is None


def test_each_round_has_problems_of_its_own(vllm_from_nothing, embedded):
    args = vllm_from_nothing.parse(["--rounds", "3", "--requests", "4"])
    prompts = vllm_from_nothing.make_prompts(args, embedded)
    assert len({tuple(p) for p in prompts}) == 12
