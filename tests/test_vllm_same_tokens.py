"""benchmarks/vllm_same_tokens.py without vLLM: how differences are explained, and what it makes of answers that are
there. With vLLM it runs in tests/engines."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.core import Request, SamplingParams
from paceline.rollout import EngineSettings, RolloutEngine

from .conftest import benchmark, tiny_model

vllm_same_tokens = benchmark("vllm_same_tokens")
race_margins = benchmark("race_margins")
homogeneity = benchmark("homogeneity")
WORDS = ("--model", "embedded", "--prompts", "1", "--samples", "3", "--depths", "3", "--sampling", "1.0", "--law", "0")


def test_two_laws_are_compared_as_scipy_does(homogeneity):
    dice = np.random.default_rng(0)
    one, other = dice.integers(0, 30, 4000).tolist(), dice.integers(0, 30, 3000).tolist()
    table = [np.bincount(x, minlength=30) for x in (one, other)]
    found, kinds = homogeneity.homogeneity(one, other)
    assert found == pytest.approx(stats.chi2_contingency(table).pvalue, rel=1e-6) and kinds == 30
    assert found > 1e-3
    skewed = [min(a, b) for a, b in zip(dice.integers(0, 30, 3000).tolist(), [28] * 3000, strict=True)]
    assert homogeneity.homogeneity(one, skewed)[0] < 1e-6
    assert homogeneity.homogeneity([*one, *range(100, 140)], other)[1] == 31, "the rare ones together"
    assert homogeneity.homogeneity([4] * 50, [4] * 60) == (1.0, 1)


def test_top_p_cuts_at_a_boundary(race_margins):
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05]).double().log()
    far = race_margins.boundary(scores, 3, 0.9, rounding=0.01)
    assert far == pytest.approx(0.05 / (2 * 0.01 * 0.09), rel=1e-4), "0.95 is ahead of the last one"
    assert race_margins.boundary(scores, 3, 0.9501, rounding=0.01) < 1
    assert race_margins.boundary(scores, 3, 1.0, rounding=0.01) == float("inf")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_difference_is_a_near_tie_only_if_rounding_can_make_it(race_margins, temperature):
    """Two answers of our own engine, of which one gets a token that is not next in the race."""
    model = tiny_model(dtype=torch.bfloat16)
    sampling = SamplingParams(temperature, max_tokens=24)
    prompt = [5, 17, 90, 3]
    seed = 11
    (done,) = RolloutEngine(model, EngineSettings(max_batch=1)).run([Request(0, tuple(prompt), sampling, seed)])
    wrong = list(done.tokens)
    wrong[9] = (wrong[9] + 1) % 128
    given = (prompt, list(done.tokens), wrong, race_margins.Sampling(temperature, 1.0), seed)
    found = race_margins.why(model, *given, race_margins.margin_first)
    assert found["position"] == 9 and found["kind"] == "unexplained" and found["gap"] > 2 * found["rounding"] > 0
    close = race_margins.why(model, *given, lambda *_: found["rounding"])
    assert close["kind"] == "near-tie"
    shorter = race_margins.why(model, prompt, wrong, wrong[:-1], given[3], seed, None)
    assert shorter == {"position": None, "kind": "another end"}


def test_the_table_counts_what_differs_and_why(vllm_same_tokens, tmp_path, capsys):
    args = vllm_same_tokens.parse([*WORDS, "--out", str(tmp_path)])
    vllm_same_tokens.prepare(args)

    def write(name: str, content: dict) -> None:
        vllm_same_tokens.file_of(args, name).write_text(json.dumps(content))

    def part(tokens: list[list[int]], accept: float | None) -> dict:
        return {"T=1": {"seconds": 1.0, "accept_length": accept, "tokens": tokens}}

    plain = [[1, 2, 3], [4, 5], [6]]
    write("plain", {"off": part(plain, None), "start_s": 1, "runner": "first"})
    drafting = {"3": part(plain, 2.5), "tuned": part([[1, 2, 3], [4, 7], [8]], 3.5), "start_s": 2, "runner": "first"}
    write("drafting", drafting)
    pairs = [["drafting", "tuned", "T=1", i] for i in (1, 2)]
    ties = {"position": 1, "kind": "near-tie", "gap": 0.01, "rounding": 0.02, "edge": 1.0}
    write(
        "explanations",
        {"differences": [{"pair": pairs[0]} | ties, {"pair": pairs[1]} | ties | {"kind": "unexplained"}]},
    )
    result = vllm_same_tokens.summarize(args)
    same, tuned = result["rows"]
    assert (same["depth"], same["identical"], same["near_ties"], same["accept_length"]) == ("3", 3, 0, 2.5)
    assert (tuned["depth"], tuned["identical"], tuned["near_ties"], tuned["unexplained"]) == ("tuned", 1, 1, 1)
    assert result["largest_gap_of_a_near_tie"] == 0.01 and len(result["unexplained"]) == 1
    vllm_same_tokens.print_result(result)
    assert "1 of 3" in capsys.readouterr().out
    vllm_same_tokens.explain(args)
    assert len(json.loads(vllm_same_tokens.file_of(args, "explanations").read_text())["differences"]) == 2, "kept"
    with pytest.raises(SystemExit, match="other requests"):
        vllm_same_tokens.prepare(vllm_same_tokens.parse([*WORDS, "--samples", "2", "--out", str(tmp_path)]))


def test_an_engine_that_fails_is_named_and_the_others_go_on(vllm_same_tokens, tmp_path, capsys):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no vLLM here; exit 3\n")
    broken.chmod(0o755)
    result = vllm_same_tokens.main([*WORDS, "--out", str(tmp_path / "out"), "--vllm-python", str(broken)])
    assert result["failed"] == ["plain", "drafting", "explanations"] and result["rows"] == []
    assert "no vLLM here" in (tmp_path / "out/same-plain.log").read_text()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == result["failed"]
