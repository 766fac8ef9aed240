"""`paceline export` as a user meets it: from a run to a drafter and a policy with their cards, and back into a run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
import yaml

from paceline.draft.eagle.files import load_drafter
from paceline.model import load_model

from ..test_cli import QUICK, here, rows


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """One that trains its drafter."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert here("train", *QUICK, f"run_dir={folder}", "spot.when=update") == 0
    return folder


def card(folder: Path) -> str:
    text = (folder / "README.md").read_text()
    assert isinstance(yaml.safe_load(text.split("---")[1]), dict), "what hubs read of a card"
    return text


def test_the_drafter_of_a_run(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert here("export", run, out, "--format", "vllm", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    newest = run / "checkpoints/step-000004"
    sha = hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()
    text = card(out)
    assert result["policy_sha256"] == sha and sha in text
    assert f"after 4 steps of the run `{run}`" in text and "countdown (medium)" in text
    metrics = [row for row in rows(run) if "rollout/spec_accept_length" in row]
    verifications = sum(row["rollout/spec_rounds"] for row in metrics)
    mean = sum(row["rollout/spec_accept_length"] * row["rollout/spec_rounds"] for row in metrics) / verifications
    assert f"| 1 | {mean:.2f} |" in text and f"last {len(metrics)} steps of the run" in text
    assert f"vllm serve {newest}" in text and f'"model": "{out}"' in text
    policy = load_model(str(newest))
    pairs = zip(
        load_drafter(newest / "drafter", policy).parameters(), load_drafter(out, policy).parameters(), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_accept_length_of_the_card_was_measured(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        here("export", run, out, "--format", "speculators", "--measure", "--prompts", "2", "--depth", "3", "--json")
        == 0
    )
    accept = json.loads(capsys.readouterr().out)["accept_length"]
    assert list(accept) == ["0", "0.6", "1"] and all(1 <= length <= 4 for length in accept.values())
    text = card(out)
    assert all(f"| {temperature} | {length:.2f} |" in text for temperature, length in accept.items())
    assert "2 prompts of countdown (medium)" in text and "chains of 3 draft tokens" in text


def test_without_a_measurement_none_is_claimed(tmp_path):
    assert here("export", "embedded", tmp_path / "out") == 0
    text = card(tmp_path / "out")
    assert "Not measured" in text and "accept length |" not in text and "20,000 answers of `embedded`" in text


def test_a_run_goes_on_with_what_was_exported(tmp_path):
    assert here("export", "embedded", tmp_path / "out", "--format", "speculators") == 0
    runs = []
    for name, drafter in (("own", "auto"), ("brought", tmp_path / "out")):
        words = [f"speculation.drafter={drafter}", "speculation.strategies=[neural:3]", "steps=1"]
        assert here("train", *QUICK, f"run_dir={tmp_path / name}", *words) == 0
        runs.append(rows(tmp_path / name)[0]["rollout/spec_accept_at/1"])
    assert min(runs) > 0.5, "how often it drafts is the tuner's business"


def test_the_policy_of_a_run_is_a_hugging_face_checkpoint(run, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    out = tmp_path / "policy"
    assert here("export", run, out, "--policy", "--json") == 0
    newest = run / "checkpoints/step-000004"
    assert (out / "model.safetensors").read_bytes() == (newest / "model.safetensors").read_bytes()
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert GenerationConfig.from_pretrained(out).eos_token_id == tokenizer.eos_token_id == 1
    message = [{"role": "user", "content": "Make 45 from 3 17 32 33.\n"}]
    inputs = tokenizer.apply_chat_template(message, return_tensors="pt", add_generation_prompt=True, return_dict=True)
    written = model.generate(**inputs, do_sample=False, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(written).startswith("<think>")
    text = card(out)
    reward = rows(run)[-1]["critic/rewards/mean"]
    assert json.loads(capsys.readouterr().out)["policy_sha256"] in text and "after 4 steps" in text
    assert f"{reward:.3f} in the last" in text
    # The drafter's card names the same weights, wherever the policy lies.
    assert here("export", run, tmp_path / "drafter", "--policy-name", out) == 0
    assert f"vllm serve {out}" in card(tmp_path / "drafter")


def test_what_does_not_work_is_told_plainly(run, tmp_path, capsys, embedded):
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    (empty / "config.yaml").write_text((run / "config.yaml").read_text())
    alone = tmp_path / "alone"
    assert here("export", "embedded", alone, "--format", "paceline") == 0
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("config.json", "model.safetensors"):
        (plain / name).write_bytes((embedded / name).read_bytes())
    capsys.readouterr()
    out = tmp_path / "out"
    for words, message in (
        (["nowhere", out], "nothing to export at nowhere"),
        (["embedded", out, "--format", "onnx"], "must be one of: vllm, sglang, speculators, paceline"),
        (["embedded", alone], "exists already"),
        ([empty, out], "has no checkpoint yet"),
        ([alone, out], "name the policy with --model"),
        ([plain, out], "has no drafter; train one"),
        ([run, out, "--model", "embedded"], "is a run and has its own"),
        ([run, out, "--measure", "--set", "seed=1"], "a run is measured with its own settings"),
    ):
        assert here("export", *words) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
    assert json.loads((alone / "config.json").read_text())["paceline"]["window"] == 128
