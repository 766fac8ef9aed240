"""Paceline's tuner as the scheduler of vLLM on a CPU, beside vLLM alone: the same greedy answers, other depths.

`make test-vllm` makes the environment; without it these tests fail. Durations are those of a virtual clock: a pass
costs a floor until it has too many tokens, as on a GPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.commands.draft import HELD_OUT_SEED
from paceline.integrations.export import export_drafter, export_policy
from paceline.model.tokenizer import load_tokenizer
from paceline.tasks.countdown import Countdown

from .test_vllm import HERE, PYTHON

pytestmark = pytest.mark.vllm

PROMPTS, SLOTS, DEPTH, KNEE = 24, 16, 5, 16
SOURCE = str(Path(paceline.__file__).parents[1])
"""The package's folder, whose metadata has the plug-in that vLLM loads."""
ENVIRONMENT = os.environ | {"PYTHONPATH": SOURCE, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    export_policy("embedded", folder / "policy")
    export_drafter("embedded", folder / "drafter", policy_name=str(folder / "policy"), depth=DEPTH)
    return folder


@pytest.fixture(scope="module")
def work(embedded) -> dict:
    """Many short answers and two long ones: a full batch, then a tail."""
    task, tokenizer = Countdown("medium", "search", HELD_OUT_SEED), load_tokenizer(str(embedded))
    prompts = [list(tokenizer.encode_prompt(task.sample(i).prompt)) for i in range(PROMPTS)]
    return {"prompts": prompts, "max_tokens": [120] * (PROMPTS - 2) + [600] * 2, "stop": [], "slots": SLOTS}


def serve(folder: Path, models: Path, work: dict, **given: object) -> dict:
    folder.mkdir(exist_ok=True)
    base = {"depth": DEPTH, "drafter": None, "tuner": None, "table": None, "overlap": True, "knee": KNEE}
    job = base | work | {"model": str(models / "policy"), "out": str(folder / "out.json")} | given
    (folder / "job.json").write_text(json.dumps(job))
    command = [str(PYTHON), str(HERE / "serve_tuned.py"), str(folder / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def plain(models, work, tmp_path_factory) -> list[list[int]]:
    return serve(tmp_path_factory.mktemp("plain"), models, work)["tokens"]


@pytest.fixture(scope="module")
def tuned(models, work, tmp_path_factory) -> dict:
    """With asynchronous scheduling, and a state to be saved."""
    folder = tmp_path_factory.mktemp("tuned")
    found = serve(
        folder, models, work, drafter=str(models / "drafter"), tuner={"state": str(folder / "state.json"), "log_s": 1}
    )
    return found | {"file": folder / "state.json"}


def depths(steps: list[list[int]], least: int, most: int) -> dict[int, int]:
    """Steps by depth, of batches of some sizes."""
    found: dict[int, int] = {}
    for batch, depth, count in steps:
        if least <= batch <= most:
            found[depth] = found.get(depth, 0) + count
    return found


def test_depths_change_with_the_batch_and_speculation_is_off_where_that_wins(tuned, plain):
    full, tail = depths(tuned["steps"], SLOTS, SLOTS), depths(tuned["steps"], 1, 2)
    print(f"{SLOTS} sequences: {full}; one or two: {tail}; {tuned['state']}")
    assert full[0] > 0.8 * sum(full.values())
    assert tail.get(3, 0) + tail.get(5, 0) > 0.8 * sum(tail.values())
    assert tuned["state"]["accept_length"] > 2
    assert tuned["tokens"] == plain
    assert any("accept length" in line for line in tuned["said"])


@pytest.mark.parametrize("overlap", [True, False], ids=["asynchronous", "synchronous"])
def test_a_later_engine_goes_on_from_the_state(overlap, tuned, models, work, plain, tmp_path):
    """It has the measurements, with the user's own table and synchronous scheduling too."""
    state = tmp_path / "state.json"
    state.write_text(tuned["file"].read_text())
    before = json.loads(state.read_text())["tuner"]["round"]
    table = None if overlap else [[1, 4, 5], [5, 8, 3], [9, 16, 0]]
    found = serve(
        tmp_path,
        models,
        work,
        drafter=str(models / "drafter"),
        tuner={"state": str(state)},
        overlap=overlap,
        table=table,
    )
    assert any("goes on from" in line for line in found["said"])
    assert json.loads(state.read_text())["tuner"]["round"] > before
    assert found["tokens"] == plain
    tail = depths(found["steps"], 1, 2)
    assert set(tail) <= ({0, 1, 2, 3, 5} if overlap else {0, 3, 5})
    assert found["seconds"] < 1.05 * tuned["seconds"], "what was learned is known"


def test_without_a_drafter_it_answers_and_says_so(models, work, plain, tmp_path):
    few = {"prompts": work["prompts"][:4], "max_tokens": work["max_tokens"][:4]}
    found = serve(tmp_path, models, work | few, tuner={})
    assert found["tokens"] == plain[:4] and found["state"] is None
    assert [line for line in found["said"] if "there is no drafter" in line]


def test_a_wrong_setting_is_refused_before_anything_is_loaded(models, work, tmp_path):
    with pytest.raises(AssertionError, match=r"UserError: .*'explored' .*additional_config\.paceline"):
        serve(tmp_path, models, work, drafter=str(models / "drafter"), tuner={"explored": 1})


@pytest.fixture
def server(models, tmp_path) -> Iterator[str]:
    """The address of `vllm serve` with one flag more."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    speculative = {"method": "eagle3", "model": str(models / "drafter"), "num_speculative_tokens": DEPTH}
    # What `vllm serve` runs; that command itself looks for a distribution called vllm, which vllm-cpu is not.
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(models / "policy")]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-num-seqs", "8"]
    command += ["--speculative-config", json.dumps(speculative)]
    command += ["--scheduler-cls", "paceline.integrations.vllm.TunedScheduler"]
    state = {"PACELINE_TUNER_STATE": str(tmp_path / "state.json")}
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT | state)
        try:
            address = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 900
            while True:
                assert running.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(1)
            yield address
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(120)


def test_one_flag_of_vllm_serve_and_its_metrics(server, models, work, plain, tmp_path):
    body = {"model": str(models / "policy"), "prompt": work["prompts"][:8], "max_tokens": 100, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        choices = json.loads(answer.read())["choices"]
    assert [c["token_ids"] for c in sorted(choices, key=lambda c: c["index"])] == [p[:100] for p in plain[:8]]
    with urllib.request.urlopen(f"{server}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    ours = [line for line in lines if line.startswith("paceline:")]
    print("\n".join(ours))
    assert any(line.startswith("paceline:spec_depth{") for line in ours)
    steps = {line.split('depth="')[1][0]: float(line.split()[-1]) for line in ours if "paceline:steps_total" in line}
    assert steps["0"] > 0 and sum(count for depth, count in steps.items() if depth != "0") > 0
    assert "Paceline's tuner picks depths of 0, 1, 2, 3, 5" in (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "state.json").read_text())["tuner"]["round"] > 0
