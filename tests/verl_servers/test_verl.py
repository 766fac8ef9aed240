"""The plug-in in verl 0.9.1: its loader, its configuration, its server classes under Ray with vLLM on a CPU.

`make test-verl` makes the environment that they live in; without it these tests fail."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core import Request, SamplingParams
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.files import load_drafter
from paceline.draft.strategy import Strategy
from paceline.integrations.export import export_drafter, export_policy
from paceline.integrations.verl import hydra_overrides, rollout_settings
from paceline.model import load_model
from paceline.model.tokenizer import load_tokenizer
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.tasks.countdown import Countdown

pytestmark = pytest.mark.verl

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = Path(os.environ.get("PACELINE_VERL_PYTHON", ROOT / ".venv-verl/bin/python"))
PROMPTS, DEPTH, LONGEST, EOS = 6, 5, 300, 1
PAGE = (ROOT / "docs/verl.md").read_text()


def in_venv(script: str, *words: object, **env: str) -> str:
    command = [str(PYTHON), str(HERE / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=os.environ | env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def composed(folder: Path, *words: str, **env: str) -> dict:
    in_venv("compose_verl.py", folder / "found.json", *words, **env)
    return json.loads((folder / "found.json").read_text())


def commands() -> list[list[str]]:
    """The words of each shell block of the page that are for verl."""
    blocks = [shlex.split(block.replace("\\\n", " ")) for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S)]
    return [[word for word in block if "actor_rollout_ref" in word] for block in blocks]


def test_verl_loads_the_plug_in_and_only_where_it_may(tmp_path):
    assert "paceline" in composed(tmp_path)["known"]
    assert "paceline" not in composed(tmp_path, VERL_USE_EXTERNAL_PLUGINS="none")["known"]


def test_the_command_of_the_page(tmp_path):
    recipe, tuner, _ = commands()
    found = composed(tmp_path, *recipe, *tuner)
    assert found["replica"] == "paceline.integrations.verl.server.PacelineReplica"
    assert found["adapter"] == "ServerAdapter"
    assert found["load_format"] == "auto"
    assert found["scheduler_cls"] == "paceline.integrations.vllm.TunedScheduler"
    assert found["speculative_config"] == {"method": "eagle3", "model": "DRAFTER", "num_speculative_tokens": 7}
    assert found["additional_config"] == {"paceline": {"explore": 0.01}}
    assert found["sleep_level"] == 2, "so the drafter has to be kept"


def test_the_settings_as_a_dictionary_say_the_same(tmp_path):
    words = hydra_overrides(rollout_settings("DRAFTER", 7, explore=0.01))
    recipe, tuner, _ = commands()
    assert composed(tmp_path, *words) == composed(tmp_path, *recipe, *tuner)


def test_the_command_for_verls_own_rollout(tmp_path):
    found = composed(tmp_path, *commands()[2])
    assert found["replica"].endswith("vllm_async_server.vLLMReplica")
    assert found["load_format"] == "auto"
    assert found["sleep_level"] == 1, "all weights are kept on the host"
    assert found["scheduler_cls"] == "paceline.integrations.vllm.TunedScheduler"
    assert found["speculative_config"]["method"] == "eagle3"


RESTORE = "collective_rpc paceline_restore_drafter"


def test_the_drafter_is_restored_where_weights_were_dropped_and_nowhere_else(tmp_path):
    in_venv("wake_verl.py", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    asleep = "the engine of rollout replica 0 sleeps: give it NEW when it is awake"
    assert found.pop("said") == [None, asleep, asleep, None]
    assert found.pop("take") == [
        "collective_rpc paceline_load_drafter",
        "collective_rpc paceline_keep_drafter",
        "call_utility_async paceline_drafter_changed",
    ]
    assert {name: RESTORE in calls for name, calls in found.items()} == {
        "weights": True,
        "kv_cache": False,
        "everything": True,
        "colocated": False,  # sleeps at level 1
        "standalone": False,  # never sleeps
        "release": True,
    }
    assert all(calls[-1] == RESTORE for calls in found.values() if RESTORE in calls), "after the memory is there again"


def ours(policy: Path, embedded: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = load_model(str(policy), "float32")
    strategy = Strategy.parse(f"neural:{DEPTH}")
    drafter = EagleDrafter(load_drafter(embedded / "drafter", model))
    engine = RolloutEngine(model, EngineSettings(max_batch=16), None, [drafter], [strategy])
    sampling = SamplingParams(0.0, max_tokens=LONGEST, stop_token_ids=(EOS,))
    done = engine.run([Request(i, tuple(p), sampling, 0) for i, p in enumerate(prompts)])
    by_id = {c.request.id: list(c.tokens) for c in done}
    return [by_id[i] for i in range(len(prompts))]


def drafters(folder: Path) -> dict[str, str]:
    """One of other weights, one of another shape, and the one in this folder again."""
    tensors = load_file(folder / "model.safetensors")
    kinds = {
        "worse": {name: torch.randn_like(tensor) * 0.02 for name, tensor in tensors.items()},
        "refused": tensors | {"fc.weight": torch.zeros(8, 8)},
    }
    for kind, changed in kinds.items():
        other = folder.parent / kind
        shutil.copytree(folder, other)
        save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    return {kind: str(folder.parent / kind) for kind in kinds} | {"back": str(folder)}


def test_verls_server_answers_and_its_drafter_outlives_sleep_and_is_exchanged(embedded, tmp_path):
    policy, drafter = tmp_path / "policy", tmp_path / "drafter"
    export_policy("embedded", policy)
    export_drafter("embedded", drafter, policy_name=str(policy), depth=DEPTH)
    task, tokenizer = Countdown("medium", "search", 5), load_tokenizer(str(embedded))
    prompts = [list(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(PROMPTS)]
    job = {
        "model": str(policy),
        "prompts": prompts,
        "max_tokens": LONGEST,
        "words": hydra_overrides(rollout_settings(drafter, DEPTH, depths=[DEPTH])),  # and off
        "drafters": drafters(drafter),
        "out": str(tmp_path / "found.json"),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    in_venv("serve_verl.py", tmp_path / "job.json")
    found = json.loads((tmp_path / "found.json").read_text())
    lengths = {name: one["accept_length"] for name, one in found.items()}
    print(f"accept length: {lengths}")
    expected = ours(policy, embedded, prompts)
    for name, one in found.items():
        assert one["tokens"] == expected, name
        assert all(len(row) == len(tokens) for row, tokens in zip(one["logprobs"], one["tokens"], strict=True))
    assert lengths["first"] > 3
    assert lengths["forgotten"] < 1.5
    assert [found[name]["said"] for name in ("worse", "back")] == [None, None]
    assert "fc.weight of shape [8, 8]" in found["refused"]["said"]
    assert lengths["worse"] < 2
    assert lengths["refused"] < 2, "the one before is still in place"
    assert lengths["back"] == pytest.approx(lengths["first"], rel=0.2)
    assert lengths["restored"] == pytest.approx(lengths["first"], rel=0.2)  # of other rounds: the tuner was off
