"""vLLM as the rollout engine, as far as it goes without vLLM: what is refused, and weights on their way. The engine
itself is run by tests/engines/test_vllm_rollout.py."""

from __future__ import annotations

import collections
import shutil

import pytest
import torch
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import build_config
from paceline.core import Request, SamplingParams
from paceline.draft.eagle.model import new_drafter
from paceline.errors import UserError
from paceline.integrations.vllm import weights as weights_module
from paceline.integrations.vllm.rollout_engine import EngineDrafters
from paceline.integrations.vllm.rollout_settings import depth, logprobs_mode, needs_race, sampling_of
from paceline.integrations.vllm.weights import read_shared, shared_weights
from paceline.kernels.noise import request_key, seed_with_key
from paceline.library.trainer import Trainer
from paceline.model.checkpoint import layout
from paceline.setup.engines import EngineSetup, is_own

from ..conftest import tiny_model

Usage = collections.namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("rollout", "sentence"),
    [
        ({"vllm": {"enforce_eager": True}}, "only with engine=vllm"),
        ({"engine": "vllm", "write_ahead": True}, "Paceline's own engine only"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(rollout, sentence):
    with pytest.raises(UserError, match=sentence):
        build_config({"rollout": rollout}, "test")


def test_an_unknown_engine_is_named_with_those_that_there_are():
    with pytest.raises(UserError, match=r"rollout\.engine=sglang is unknown; there are: paceline, vllm"):
        is_own(build_config({"rollout": {"engine": "sglang"}}, "test"))


def start(tmp_path, **settings):
    Trainer(
        "embedded", settings={"run_dir": str(tmp_path / "run"), "cluster.workers": 1, "steps": 1} | settings
    ).train()


def test_without_vllm_one_sentence_says_what_to_install(tmp_path):
    with pytest.raises(UserError, match="vLLM is not installed; install it"):
        start(tmp_path, **{"rollout.engine": "vllm"})
    assert not (tmp_path / "run").exists(), "a run that cannot start leaves nothing behind"


def test_a_python_that_has_no_vllm_is_told_with_its_log(tmp_path):
    python = shutil.which("python3")
    with pytest.raises(UserError, match=r"the vLLM engine could not be started: .*(vLLM is not installed|vllm\.log)"):
        start(tmp_path, **{"rollout.engine": "vllm", "rollout.vllm_python": python})


def test_an_argument_that_is_not_the_users_to_set_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"rollout\.vllm has 'model', which Paceline sets itself"):
        start(tmp_path, **{"rollout.engine": "vllm", "rollout.vllm": {"model": "x"}, "rollout.vllm_python": "python3"})


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_commands_about_our_engine_refuse_another_one(command):
    done = CliRunner().invoke(app, [command, "rollout.engine=vllm", "steps=1"])
    assert f"paceline {command} is about Paceline's own engine" in str(done.exception)


def test_weights_arrive_as_they_are(tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    with shared_weights(dict(layout(model)), tmp_path) as shared:
        arrived = dict(read_shared(shared, None))
    assert arrived.keys() == dict(layout(model)).keys()
    assert all(torch.equal(tensor, arrived[name]) for name, tensor in layout(model))
    assert not list(tmp_path.iterdir()), "nothing stays behind"


def test_where_shared_memory_is_full_they_go_by_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_module.shutil, "disk_usage", lambda place: Usage(10, 10, 0))
    with shared_weights({"a": torch.ones(3)}, tmp_path) as shared:
        assert shared.file.startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_where_there_is_no_room_at_all_one_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_module.shutil, "disk_usage", lambda place: Usage(10, 10, 0))
    with (
        pytest.raises(UserError, match="no folder for the policy's weights could be made in"),
        shared_weights({"a": torch.ones(3)}, tmp_path / "gone"),
    ):
        pass


def drafters_setup(tmp_path, notes):
    model = tiny_model("llama", dtype=torch.float32)
    config = build_config({}, "test")
    return EngineSetup(config, model, "", new_drafter(model, 32, 0), None, 0, 1, tmp_path, lambda: None, notes.append)


def drafters_of(tmp_path, notes):
    return EngineDrafters(drafters_setup(tmp_path, notes))


def test_versions_of_the_drafter_go_to_vllm_and_the_first_one_stays(tmp_path):
    drafters = drafters_of(tmp_path, [])
    first = drafters.newest()
    assert (first / "config.json").is_file() and drafters.exchange() is None, "nothing is new"
    for _ in range(5):
        drafters.changed = True
        latest = drafters.exchange()
    assert latest.endswith("version-00005") and (first / "config.json").is_file()
    drafters.policy_updated()
    assert drafters.exchange() is None, "it uses the policy's whole head, which vLLM has"


def test_a_drafter_that_cannot_be_written_costs_a_sentence(tmp_path):
    notes = []
    drafters = drafters_of(tmp_path, notes)
    drafters.newest()
    shutil.rmtree(tmp_path / "vllm-drafter-0")
    (tmp_path / "vllm-drafter-0").write_text("in the way, as a full disk is")
    drafters.changed = True
    assert drafters.exchange() is None
    assert len(notes) == 1 and notes[0].startswith(
        "vLLM goes on with the drafter before: version 1 of the drafter could"
    )


def test_sampling_in_vllms_words():
    sampling = SamplingParams(0.7, top_k=5, top_p=0.9, max_tokens=50, min_tokens=2, stop_token_ids=(1, 7), stop=("x",))
    out = sampling_of(Request(0, (2, 3, 4), sampling), 20)
    assert out["max_tokens"] == 17, "what the context has room for"
    assert (out["temperature"], out["top_k"], out["top_p"], out["min_tokens"]) == (0.7, 5, 0.9, 2)
    assert out["stop_token_ids"] == [1, 7] and out["ignore_eos"] and out["stop"] == ["x"] and out["detokenize"]
    assert out["logprobs"] == 0


@pytest.mark.parametrize(
    ("temperature", "mode"), [(1.0, "raw_logprobs"), (0.0, "raw_logprobs"), (0.6, "processed_logprobs")]
)
def test_log_probabilities_are_those_at_the_temperature(temperature, mode):
    assert logprobs_mode(build_config({"rollout": {"temperature": temperature}}, "test")) == mode


@pytest.mark.parametrize(("seed", "number"), [(0, 0), (5, 7), (2**63 - 1, 2**40)])
def test_vllm_gets_the_seed_with_which_its_noise_is_ours(seed, number):
    key = request_key(seed, number)
    assert request_key(seed_with_key(key), 0) == key and -(2**63) <= seed_with_key(key) < 2**63


def test_on_a_cpu_above_temperature_0_speculation_needs_the_race(tmp_path):
    notes = []
    drafters = drafters_of(tmp_path, notes)
    setup = drafters_setup(tmp_path, notes)
    assert needs_race(setup) and drafters.newest()
    drafters.turn_off()
    assert drafters.newest() is None and "rollouts go without speculation" in notes[0]


def test_the_deepest_draft_is_that_of_the_strategies():
    assert depth(build_config({"speculation": {"strategies": ["suffix:8", "neural:4", "neural:5"]}}, "test")) == 5
    assert depth(build_config({}, "test")) == 7
