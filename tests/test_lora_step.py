"""benchmarks/lora_step.py, small."""

from __future__ import annotations

import json

import pytest

from .conftest import benchmark

lora_step = benchmark("lora_step")


def test_all_variants(lora_step, monkeypatch, capsys):
    words = ["--geometry", "tiny", "--steps", "1", "--tokens", "8", "--prompts", "2", "--samples", "4", "--rank", "4"]
    monkeypatch.setattr("sys.argv", ["lora_step.py", *words, "--set", "model.threads=1"])
    lora_step.main()
    out = capsys.readouterr().out
    result = json.loads(out.strip().splitlines()[-1])
    full, lora, limited = (result["variants"][name] for name in lora_step.VARIANTS)
    assert full["base"] is None and lora["base"] == limited["base"] == "device", "on a CPU there is one memory"
    assert full["plan_gb"]["optimizer"] > 3 * lora["plan_gb"]["optimizer"]
    assert all(one["steps"] == 1 and one["rollout_tokens_per_s"] > 0 and one["grad_norm"] > 0 for one in (full, lora))
    assert result["settings"]["limit_gb"] == 40 and set(result["ratios"]) == {"lora", "lora-limited"}
    assert "memory: memory was not measured, at most 40 GB: unknown" in out
    assert "a card of 40 GB" in out and "step 1 (warm-up)" in out and "as fast as training all weights" in out


def test_a_variant_that_fails_does_not_hide_the_others(lora_step, capsys):
    rows = [{"timing_s/gen": 2.0, "timing_s/update_actor": s, "actor/tokens": 100.0, "actor/grad_norm": 1.0,
             "tokens": 50.0} for s in (9.0, 2.0, 3.0)]  # fmt: skip
    full = lora_step.summarize(rows) | {"reserved_gb": None, "base": None}
    assert full["steps"] == 2 and full["update_s"] == 2.5 and full["update_tokens_per_s"] == 40
    assert full["rollout_tokens_per_s"] == 25
    fast = full | {"update_tokens_per_s": 60.0}
    results = {"full": full, "lora": fast, "lora-limited": {"failed": 1}}
    assert lora_step.ratios(results) == {"lora": {"rollout_tokens_per_s": 1.0, "update_tokens_per_s": 1.5}}
    lora_step.print_table(results)
    assert "lora-limited  failed" in capsys.readouterr().out
    assert lora_step.verdict(results, 40) == [
        "memory: the run failed, at most 40 GB: does not hold",
        "rollout, with LoRA over without: 1.00 times, at least 0.97: holds",
        "update, LoRA over full: 1.50 times, at least 1.3: holds",
    ]
    results["lora-limited"] = fast | {"used_gb": 38.5}
    assert lora_step.verdict(results, 40)[0] == "memory: 38.5 GB of the card were used, at most 40 GB: holds"


def test_variants_are_named(lora_step, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lora_step.py", "--variants", "lora,half"])
    with pytest.raises(SystemExit, match="no variant is called half"):
        lora_step.main()
