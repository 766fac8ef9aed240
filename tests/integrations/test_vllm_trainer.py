"""What trains a drafter beside vLLM, without vLLM: folders of versions, shapes, the policies that are read, and the
side-car with all that can happen to it. tests/engines/test_vllm_drafter.py has the same in a real engine."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.config.training import SpotConfig
from paceline.draft.eagle.files import WEIGHTS, load_drafter, save_drafter
from paceline.draft.eagle.loss import read_sequences
from paceline.draft.eagle.model import DrafterShape, EagleModel, new_drafter
from paceline.errors import RunError, UserError
from paceline.integrations.vllm.cold_start import speculation
from paceline.integrations.vllm.drafter_folder import KEPT_VERSIONS, RECORD, DrafterFolder, vllm_files
from paceline.integrations.vllm.features import DecodedPolicy, TransformersPolicy, load_policy
from paceline.integrations.vllm.online import OnlineDrafter
from paceline.integrations.vllm.plan import FollowPlan, plan_memory
from paceline.integrations.vllm.same_shape import difference
from paceline.integrations.vllm.side_car import SideCarTraining
from paceline.model import Decoder, load_model, save_model

from ..conftest import tiny_model
from ..processes import gone, runs

DEADLINE_S = 600.0  # that nothing reaches, however busy the machine is
SPOT = {"merge_share": 1.0, "buffer_mb": 8, "step_ms": 20}


@pytest.fixture(scope="module")
def policy() -> Decoder:
    """A random one, with few tokens, so that a drafter soon knows the common ones."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 16}
    return tiny_model(dtype=torch.float32, **sizes)


@pytest.fixture(scope="module")
def saved(policy, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_model(policy, folder)
    return folder


def answers(count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers: any tokens do, since what is learned is what the policy would say behind each of them."""
    rng = random.Random(seed)
    done = [[rng.randrange(16) for _ in range(24)] for _ in range(count)]
    return [(tokens[:4], tokens[4:]) for tokens in done]


def online(policy: Decoder, folder: Path, drafter: EagleModel | None = None) -> OnlineDrafter:
    drafter = drafter or new_drafter(policy, 32, 0)
    return OnlineDrafter(DecodedPolicy(policy), drafter, folder, SpotConfig.model_validate(SPOT))


def feed(what: OnlineDrafter, count: int = 96, seed: int = 0) -> None:
    for prompt, tokens in answers(count, seed):
        what.finished(prompt, tokens)


def plan(saved: Path, folder: Path, **changes: object) -> FollowPlan:
    arguments = speculation(saved, folder, dtype="float32")
    started_with = Path(arguments["speculative_config"]["model"])
    known = {"policy": str(saved), "drafter": started_with, "started_with": started_with, "folder": folder}
    return FollowPlan(**known | {"dtype": "float32", "device": "cpu", "spot": SPOT, "threads": 1} | changes)


def test_speculation_makes_a_drafter_once_and_takes_the_newest_then(saved, tmp_path):
    first = speculation(saved, tmp_path / "drafter", depth=3, dtype="float32")
    folder = Path(first["speculative_config"]["model"])
    assert first["speculative_config"] == {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]
    policy = load_model(str(saved))
    place = DrafterFolder(tmp_path / "drafter")
    newer = place.write(7, new_drafter(policy, 32, 1))
    assert speculation(saved, tmp_path / "drafter")["speculative_config"]["model"] == str(newer)
    with pytest.raises(UserError, match="depth=0"):
        speculation(saved, tmp_path / "drafter", depth=0)


@pytest.mark.parametrize("form", ["paceline", "speculators", "elsewhere"])
def test_a_warm_start_from_an_eagle3_checkpoint(form, policy, saved, tmp_path):
    from paceline.integrations.export import export_drafter

    drafter = EagleModel(policy, DrafterShape(96, 64)).init_weights(3)
    save_drafter(drafter, tmp_path / "own")
    given = tmp_path / "given"
    export_drafter(str(tmp_path / "own"), given, "speculators" if form == "speculators" else "vllm", str(saved))
    if form == "elsewhere":  # as SpecForge writes it: nothing of ours, and embeddings of its own
        config = json.loads((given / "config.json").read_text())
        for name in ("paceline", "layer_types"):
            config.pop(name)
        (given / "config.json").write_text(json.dumps(config))
        tensors = load_file(given / WEIGHTS) | {"embed_tokens.weight": policy.embed.weight.clone()}
        save_file(tensors, given / WEIGHTS)
    made = Path(speculation(saved, tmp_path / "v", drafter=given, dtype="float32")["speculative_config"]["model"])
    loaded = load_drafter(made, policy)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), drafter.parameters(), strict=True))
    assert loaded.shape.window == 64
    assert "embed_tokens.weight" not in load_file(made / WEIGHTS), "vLLM shares the policy's then"


def test_old_versions_leave_but_not_the_one_that_the_engine_was_started_with(policy, tmp_path):
    started_with = DrafterFolder(tmp_path).write(0, new_drafter(policy, 32, 0))
    place = DrafterFolder(tmp_path, started_with)
    for version in range(1, 7):
        place.write(version, new_drafter(policy, 32, version))
    assert sorted(f.name for f in tmp_path.glob("version-*")) == [
        f"version-{n:05d}" for n in (0, *range(7 - KEPT_VERSIONS, 7))
    ]
    assert place.newest()[0] == 6


def test_versions_come_out_and_are_recorded(policy, tmp_path):
    trained = online(policy, tmp_path)
    feed(trained)
    published = []
    for _ in range(4):
        for _ in range(15):
            assert trained.step()
        published.append(trained.publish())
    rows = [json.loads(line) for line in (tmp_path / RECORD).read_text().splitlines()]
    assert rows[-1]["expected_accept_after"] > 1.1 * rows[0]["expected_accept_before"]
    assert all(row["published"] == (row["expected_accept_after"] >= row["expected_accept_before"]) for row in rows)
    newest = [new for new in published if new][-1]
    on_disk = load_drafter(Path(newest.folder), policy)
    mine = trained.drafter.parameters()
    assert all(torch.equal(a, b) for a, b in zip(on_disk.parameters(), mine, strict=True))


def test_a_worse_drafter_is_refused_and_a_better_one_taken(policy, tmp_path):
    first = online(policy, tmp_path / "first")
    feed(first)
    for _ in range(60):
        first.step()
    assert first.publish() is not None
    good = first.drafter
    save_drafter(good, tmp_path / "good")
    save_drafter(EagleModel(policy, good.shape).init_weights(5), tmp_path / "bad")
    start = EagleModel(policy, good.shape).init_weights(6)
    trained = online(policy, tmp_path / "v", start)
    with pytest.raises(UserError, match="no held-out answer was read"):
        trained.offer(tmp_path / "good")
    feed(trained, 64)
    new = trained.offer(tmp_path / "good")
    assert new.version == 1
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), good.parameters(), strict=True))
    with pytest.raises(UserError, match=r"is worse than version 1.*keeps version 1"):
        trained.offer(tmp_path / "bad")
    save_drafter(EagleModel(policy, DrafterShape(96, 16)).init_weights(), tmp_path / "other")
    with pytest.raises(UserError, match="another shape"):
        trained.offer(tmp_path / "other")


def test_differences_in_shape_are_one_sentence(policy, tmp_path):
    place = DrafterFolder(tmp_path, tmp_path / "version-00000")
    mine = place.write(0, EagleModel(policy, DrafterShape(96, 32)).init_weights())
    assert difference(place.write(1, EagleModel(policy, DrafterShape(96, 32)).init_weights(1)), mine) is None
    wider = place.write(2, EagleModel(policy, DrafterShape(64, 32)).init_weights())
    assert "midlayer.mlp.down_proj.weight of shape [64, 64]" in difference(wider, mine)
    window = place.write(3, EagleModel(policy, DrafterShape(96, 16)).init_weights())
    assert "sliding_window 16" in difference(window, mine)
    head = place.write(4, EagleModel(policy, DrafterShape(96, 32, own_head=True)).init_weights())
    assert "a head of its own" in difference(head, mine)
    vocab = place.write(5, EagleModel(policy, DrafterShape(96, 32), torch.arange(4)).init_weights())
    assert "the tensor d2t" in difference(vocab, mine)
    with pytest.raises(UserError, match=r"config\.json"):
        difference(tmp_path / "nowhere", mine)


def test_a_new_policy_is_read_and_its_head_goes_to_the_engine(saved, tmp_path):
    policy = load_model(str(saved), "float32")
    whole, part = (online(policy, tmp_path / name, d) for name, d in (
        ("whole", new_drafter(policy, 32, 0)),
        ("part", new_drafter(policy, 32, 0, torch.arange(8))),
    ))  # fmt: skip
    before = {name: t.clone() for name, t in policy.state_dict().items()}
    changed = {"lm_head.weight": policy.head.weight * 2}
    assert whole.policy_updated(changed) is None, "the engine's drafter shares the policy's head"
    new = part.policy_updated(changed)
    assert torch.equal(load_file(Path(new.folder) / WEIGHTS)["lm_head.weight"], changed["lm_head.weight"][:8])
    assert torch.equal(policy.state_dict()["norm"], before["norm"])
    for weights, words in (
        ({"x": torch.ones(1)}, "none of its tensors"),
        ({"lm_head.weight": torch.ones(2, 2)}, "shape"),
    ):
        with pytest.raises(UserError, match=words):
            whole.policy_updated(weights)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    """A mixture of experts, which the decoder here does not run."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixture")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_transformers_sees_the_same_features_as_the_decoder(policy, saved):
    drafter = new_drafter(policy, 32, 0)
    sequences = [([*prompt, *tokens], len(prompt)) for prompt, tokens in answers(3)]
    theirs = TransformersPolicy(saved, torch.float32, torch.device("cpu")).read(drafter, sequences)
    ours = read_sequences(drafter, sequences)
    for name, tensor in vars(ours).items():
        torch.testing.assert_close(getattr(theirs, name), tensor, rtol=1e-4, atol=1e-4)


def test_a_mixture_of_experts_is_read_by_transformers_and_its_drafter_learns(mixture, tmp_path):
    arguments = speculation(mixture, tmp_path, window=32, dtype="float32")
    followed = load_policy(str(mixture), "float32", torch.device("cpu"))
    assert isinstance(followed, TransformersPolicy)
    drafter = load_drafter(Path(arguments["speculative_config"]["model"]), followed.decoder)
    trained = OnlineDrafter(followed, drafter, tmp_path, SpotConfig.model_validate(SPOT))
    generator = torch.Generator().manual_seed(0)
    for _ in range(32):
        prompt = torch.randint(2, 64, (1, 6), generator=generator)
        done = followed.model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0].tolist()
        trained.finished(done[:6], done[6:])
    for _ in range(60):
        trained.step()
    trained.publish()
    row = trained.place.rows()[-1]
    assert row["published"] and row["expected_accept_after"] > 1.05 * row["expected_accept_before"]


def test_models_that_scale_their_logits_are_refused(tmp_path):
    config = AutoConfig.for_model(
        "gemma2", vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="scales its embeddings or logits"):
        load_policy(str(tmp_path), "float32", torch.device("cpu"))


def test_memory_is_planned_from_headers_alone(saved, policy, tmp_path):
    needs = plan_memory(plan(saved, tmp_path), torch.device("cpu"), SpotConfig.model_validate(SPOT))
    assert needs.policy == policy.config.parameters * 4
    assert needs.buffer == 8 * 2**20 and needs.training > 0
    assert "for a copy of its weights" in needs.describe("cpu")


class SideCarRun:
    """A side-car with what it said."""

    def __init__(self, plan: FollowPlan, deadline_s: float = DEADLINE_S):
        self.said: list[str] = []
        self.training = SideCarTraining(plan, "idle", self.said.append, deadline_s, plan.folder / "log")
        self.training.wait_until_following()

    def train_until(self, done) -> None:
        end = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < end, self.said
            self.training.train(0.2)


@pytest.fixture
def side_car(saved, tmp_path):
    run = SideCarRun(plan(saved, tmp_path / "v"))
    yield run
    run.training.close()


def test_a_side_car_trains_while_the_engine_is_idle_and_not_while_it_is_busy(side_car):
    training = side_car.training
    training.activity("busy")
    training.answers(answers(128))
    versions = []
    for _ in range(10):
        time.sleep(0.2)
        versions.append(training.poll())
    assert not any(versions), "the engine was busy"
    side_car.train_until(lambda: versions.append(training.poll()) or versions[-1] is not None)
    assert Path(versions[-1].folder, "config.json").is_file()
    assert len(side_car.said) == 1 and "GB" in side_car.said[0]


def test_a_killed_side_car_is_one_sentence(side_car):
    os.kill(side_car.training.pid, signal.SIGKILL)
    side_car.train_until(lambda: side_car.training.ended is not None)
    (sentence,) = side_car.said[1:]
    assert "killed by signal 9" in sentence and "generation goes on" in sentence
    side_car.training.answers(answers(4))
    assert side_car.training.poll() is None
    with pytest.raises(UserError, match="was not examined"):
        side_car.training.offer(Path("x"))


def test_a_silent_side_car_is_given_up(saved, tmp_path):
    run = SideCarRun(plan(saved, tmp_path / "v"), deadline_s=8.0)
    pid = run.training.pid
    os.kill(pid, signal.SIGSTOP)
    run.train_until(lambda: run.training.ended is not None)
    assert "silent" in run.said[-1] and gone([pid])


def test_a_full_disk_is_one_sentence_and_the_version_comes_when_there_is_space(side_car):
    training = side_car.training
    _, hard = resource.prlimit(training.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(training.pid, resource.RLIMIT_FSIZE, (64, hard))
    training.answers(answers(128))
    side_car.train_until(lambda: training.poll() is None and any("could not be written" in s for s in side_car.said))
    training.train(3.0)
    assert len(side_car.said) == 2 and "generation goes on" in side_car.said[1], "once, however often it is tried"
    resource.prlimit(training.pid, resource.RLIMIT_FSIZE, (hard, hard))
    versions = []
    side_car.train_until(lambda: versions.append(training.poll()) or versions[-1] is not None)
    assert training.ended is None


def test_a_side_car_follows_the_policy_and_refuses_offers(side_car, policy, saved, tmp_path):
    side_car.training.answers(answers(64))
    save_drafter(EagleModel(policy, DrafterShape(96, 16)).init_weights(), tmp_path / "other")
    with pytest.raises(UserError, match="another shape"):
        side_car.training.offer(tmp_path / "other")
    side_car.training.policy_updated({"lm_head.weight": policy.head.weight})
    side_car.training.policy_updated(saved)
    side_car.training.policy_updated({"unknown": torch.ones(1)})
    side_car.train_until(lambda: any("could not be updated" in s for s in side_car.said))
    assert not list((tmp_path / "v").glob(".policy-*")), "what was written for it is removed"


def test_what_cannot_be_loaded_is_said(saved, tmp_path):
    run = SideCarRun(plan(saved, tmp_path / "v", device="cuda:99"))
    assert "cuda:99" in run.training.ended and "generation goes on" in run.said[-1]


PARENT = """
import sys, time
from pathlib import Path
from paceline.integrations.vllm.plan import FollowPlan
from paceline.integrations.vllm.side_car import SideCarTraining
policy, drafter, folder = sys.argv[1:]
plan = FollowPlan(policy, Path(drafter), Path(drafter), Path(folder), "float32", "cpu", threads=1)
training = SideCarTraining(plan, "always", print, 60.0, None)
training.wait_until_following()
print(training.pid, flush=True)
time.sleep(60)
"""


def test_a_side_car_ends_with_its_engine(saved, tmp_path):
    made = plan(saved, tmp_path / "v")
    command = [sys.executable, "-c", PARENT, str(saved), str(made.drafter), str(made.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        lines = [parent.stdout.readline(), parent.stdout.readline()]
        pid = int(lines[1])
        assert runs(pid)
        parent.kill()
    assert gone([pid])


def test_a_write_that_fails_leaves_no_folder(policy, tmp_path):
    (tmp_path / "v").write_text("a file where the folder should be")
    with pytest.raises(RunError, match="version 1 of the drafter could not be written"):
        DrafterFolder(tmp_path / "v").write(1, new_drafter(policy, 32, 0))
    assert vllm_files(new_drafter(policy, 32, 0)).config["norm_before_residual"] is False
