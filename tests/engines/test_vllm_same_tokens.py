"""Same seed, same tokens, in vLLM on a CPU: sampled answers with speculation at several depths, tuned and off, and the
law of what is drawn. vLLM alone draws wrongly here above temperature 0 when it speculates.

`make test-vllm` makes the environment; without it these tests fail. `make soak-vllm` runs the long forms: 256 requests,
and 40,960 draws of 4,096 tokens."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from scipy import stats

from paceline.commands.draft import HELD_OUT_SEED
from paceline.core import Completion, Request, SamplingParams
from paceline.draft.eagle.files import write_files
from paceline.draft.eagle.model import new_drafter
from paceline.integrations.export import export_drafter, export_policy
from paceline.integrations.vllm.drafter_folder import vllm_files
from paceline.model import Decoder, load_model
from paceline.model.attention import PackedAttention
from paceline.model.checkpoint import save_model
from paceline.model.tokenizer import load_tokenizer
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.rollout.differences import explain
from paceline.tasks.countdown import Countdown

from ..conftest import benchmark, tiny_model
from .test_vllm import HERE, PYTHON
from .test_vllm_scheduler import ENVIRONMENT

pytestmark = pytest.mark.vllm
vllm_same_tokens = benchmark("vllm_same_tokens")

DEPTHS = (3, 5, 7, "tuned")
SAMPLING = {"T=1": {"temperature": 1.0}, "T=0.6": {"temperature": 0.6, "top_p": 0.9}}
SLOTS = 32
FORMS = [
    pytest.param((16, 96), id="short"),
    pytest.param((256, 400), id="long", marks=pytest.mark.soak),
]
"""Requests, and tokens of each at most."""
SMALLEST_P = 1e-4


def serve(folder: Path, **job: object) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    base = {"raced": True, "slots": SLOTS, "out": str(folder / "out.json")}
    (folder / "job.json").write_text(json.dumps(base | job))
    command = [str(PYTHON), str(HERE / "serve_sampled.py"), str(folder / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "out.json").read_text())
    assert found["racing"] == ["first"], found["said"]
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    export_policy("embedded", folder / "policy")
    export_drafter("embedded", folder / "drafter", policy_name=str(folder / "policy"), depth=7)
    return folder


@pytest.fixture(scope="module", params=FORMS)
def served(request, models, embedded, tmp_path_factory) -> dict:
    """Answers by speculation: with seeds, without, and greedy ones."""
    count, longest = request.param
    folder = tmp_path_factory.mktemp("served")
    task, tokenizer = Countdown("medium", "search", HELD_OUT_SEED), load_tokenizer(str(embedded))
    prompts = [list(tokenizer.encode_prompt(task.sample(i // 2).prompt)) for i in range(count)]
    common = {"max_tokens": longest, "ignore_eos": True, "stop_token_ids": [1]}
    seeded = {"prompts": prompts, "seeds": list(range(count))} | common
    parts = {name: seeded | sampling for name, sampling in SAMPLING.items()}
    few = {"prompts": prompts[:8], "seeds": None} | common | {"max_tokens": 32}
    parts |= {"unseeded": few | {"temperature": 1.0}, "greedy": few | {"temperature": 0.0}}
    parts["penalties"] = few | {"seeds": list(range(8)), "temperature": 1.0, "repetition_penalty": 1.2, "top_k": 20}
    job = {"model": str(models / "policy"), "drafter": str(models / "drafter"), "parts": parts}
    found = {depth: serve(folder / str(depth), speculation=depth, **job) for depth in (0, *DEPTHS)}
    return {"prompts": prompts, "answers": found, "job": job, "folder": folder}


@pytest.mark.parametrize("depth", DEPTHS)
def test_answers_do_not_depend_on_speculation(served, models, depth, vllm_same_tokens):
    """But for near-ties, which are explained."""
    plain, drafted = served["answers"][0], served["answers"][depth]
    assert drafted["accept_length"] > 2, "otherwise nothing is shown"
    model = load_model(str(models / "policy"), "float32")
    for name, sampling in SAMPLING.items():
        pairs = list(zip(plain["tokens"][name], drafted["tokens"][name], strict=True))
        different = [i for i, (a, b) in enumerate(pairs) if a != b]
        given = vllm_same_tokens.Sampling(sampling["temperature"], sampling.get("top_p", 1.0))
        reasons = [
            vllm_same_tokens.why(model, served["prompts"][i], *pairs[i], given, i, vllm_same_tokens.margin_first)
            for i in different
        ]
        same = len(pairs) - len(different)
        print(f"depth {depth}, {name}: {same} of {len(pairs)} identical, {drafted['accept_length']:.2f}, {reasons}")
        assert {reason["kind"] for reason in reasons} <= {"near-tie", "boundary"}
        assert same >= 0.97 * len(pairs)
        assert len({tuple(tokens) for tokens in plain["tokens"][name]}) > 0.7 * len(pairs), "they are random"
    for name in ("unseeded", "greedy", "penalties"):
        assert drafted["tokens"][name] == plain["tokens"][name], name


def test_they_are_those_of_our_engine(served, models):
    """Request 0 with the same seed: the first model runner draws with our noise."""
    model = load_model(str(models / "policy"), "float32")
    longest = served["job"]["parts"]["T=1"]["max_tokens"]
    sampling = SamplingParams(1.0, max_tokens=longest, stop_token_ids=(1,))
    for seed in range(6):
        engine = RolloutEngine(model, EngineSettings(max_batch=1))
        asked = Request(0, tuple(served["prompts"][seed]), sampling, seed)
        (done,) = engine.run([asked])
        tokens = served["answers"][0]["tokens"]["T=1"][seed]
        if list(done.tokens) != tokens:
            theirs = Completion(asked, tokens, [0.0] * len(tokens), done.finish_reason)
            assert all(difference.near_tie for difference in explain(model, [(done, theirs)]))


def test_without_seeds_the_engines_seed_decides(served):
    job = served["job"] | {"parts": {"unseeded": served["job"]["parts"]["unseeded"]}}
    first = served["answers"][0]["tokens"]["unseeded"]
    assert len({tuple(tokens) for tokens in first}) == len(first), "two requests with one prompt differ"
    other = serve(served["folder"] / "other", speculation=0, seed=1, **job)["tokens"]["unseeded"]
    assert all(a != b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("vocab", "draws"), [(512, 8192), pytest.param(4096, 40_960, marks=pytest.mark.soak)])
def test_the_law_holds_with_speculation_on(vocab, draws, tmp_path):
    """The second token of many answers to one prompt, which is verified against a draft, has the policy's distribution,
    summed over every possible first one."""
    shape = {"vocab_size": vocab, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    model = tiny_model(dtype=torch.float32, **shape)
    save_model(model, tmp_path / "policy")
    write_files(vllm_files(new_drafter(model, 64, seed=1)), tmp_path / "drafter")
    prompt = [5, 17, 90, 3]
    part = {"prompts": [prompt] * draws, "seeds": list(range(draws)), "temperature": 1.0, "max_tokens": 3}
    job = {"model": str(tmp_path / "policy"), "drafter": str(tmp_path / "drafter"), "slots": 256}
    found = serve(tmp_path / "served", speculation=3, parts={"law": part | {"ignore_eos": True}}, **job)
    drawn = torch.tensor(found["tokens"]["law"])
    first = last_logits(model, [prompt])[0].softmax(-1)
    second = torch.zeros(vocab, dtype=torch.float64)
    for start in range(0, vocab, 256):
        given = last_logits(model, [[*prompt, t] for t in range(start, start + 256)]).softmax(-1)
        second += first[start : start + 256] @ given
    p = [chi_square(drawn[:, 0], first), chi_square(drawn[:, 1], second)]
    print(f"{draws} draws of {vocab} tokens: p = {p[0]:.4f} and {p[1]:.4f}, accept length {found['accept_length']:.3f}")
    assert min(p) > SMALLEST_P
    assert chi_square(drawn[:, 1], first) < SMALLEST_P, "another law would be noticed"


def last_logits(model: Decoder, sequences: list[list[int]]) -> torch.Tensor:
    attention = PackedAttention([len(t) for t in sequences], torch.device("cpu"))
    tokens = torch.tensor([t for sequence in sequences for t in sequence])
    hidden, _ = model(tokens, attention.positions(), attention)
    return model.logits(hidden[torch.tensor([len(t) for t in sequences]).cumsum(0) - 1]).double()


def chi_square(tokens: torch.Tensor, p: torch.Tensor) -> float:
    """p-value of the counts, with tokens too rare for the test pooled."""
    counts = torch.bincount(tokens, minlength=len(p)).double()
    expected = p * len(tokens)
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def test_the_second_model_runner_verifies_by_the_noise_of_its_own_sampler(tmp_path):
    """Its kernels in Triton's interpreter: each row draws what it would draw alone."""
    out = tmp_path / "out.json"
    command = [str(PYTHON), str(HERE / "race_second.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    alone, verified = found["alone"], found["verified"]
    assert verified[0] == alone[0][:2], "the second draft token is wrong"
    assert verified[1:] == alone[1:], "the others are right"
    assert verified[2] == found["best"], "greedy"


def test_the_benchmark_runs(tmp_path, capsys, vllm_same_tokens):
    words = ["--model", "embedded", "--out", str(tmp_path), "--vllm-python", str(PYTHON), "--prompts", "3", "--eager"]
    words += ["--samples", "2", "--max-tokens", "40", "--law", "300", "--law-temperatures", "1.0", "--batch", "16"]
    result = vllm_same_tokens.main([*words, "--depths", "3,5"])
    print(capsys.readouterr().out)
    assert result["failed"] == [] and result["unexplained"] == [] and result["runner"] == "first"
    assert {(row["depth"], row["sampling"]) for row in result["rows"]} == {
        (depth, sampling) for depth in ("3", "5", "tuned") for sampling in ("T=1", "T=0.6, top-p 0.95")
    }
    assert all(row["identical"] + row["near_ties"] + row["boundary"] == 6 for row in result["rows"])
    (law,) = result["law"]
    assert law["depth"] == "5" and law["smallest_p_corrected"] > 1e-3
