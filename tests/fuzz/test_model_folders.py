"""Models and drafters that somebody damaged: each works, or is refused in one sentence.

What works has finite weights in full precision and writes finite numbers; nothing outside of the folder is opened; and
nothing waits.
"""

from __future__ import annotations

import random
import shutil

import pytest
import torch
from safetensors.torch import load_file

from paceline.core import Request, SamplingParams
from paceline.draft.eagle.files import find_drafter, load_drafter
from paceline.errors import UserError
from paceline.integrations.export import export_drafter, export_policy
from paceline.integrations.export_formats import FORMATS
from paceline.model import load_model
from paceline.model.tokenizer import load_tokenizer
from paceline.rollout import EngineSettings, RolloutEngine
from tests.fuzz.folders import copy_base, damage, make_bases, make_outside
from tests.fuzz.mutate_files import Watch, deadline, refused

CHAT = [{"role": "user", "content": "Make 9 from 4 5."}]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small wait for a second thread more than they gain from it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders to damage, each with one outside of it that would work in its place."""
    folder = tmp_path_factory.mktemp("bases")
    found = []
    for base in make_bases(folder):
        outside = folder / f"outside-{base.name}"
        make_outside(base, outside)
        found.append((base, outside))
    return found


def use(folder, out, form) -> tuple[int, int]:
    """All that can be done with a folder -> how much of it worked, and how much was refused"""
    tokens, model, done, no = [3, 7], None, 0, 0
    with refused() as said:
        tokenizer = load_tokenizer(str(folder))
        for prompt in ("Make 9 from 4 5.\n", CHAT):
            with refused():
                tokens = tokenizer.encode_prompt(prompt, "line 1 of data.jsonl") or tokens
        tokenizer.decode(tokens)
        done += 1
    no += len(said)
    with refused() as said:
        model = load_model(str(folder), "float32")
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        done += 1
    no += len(said)
    if model is not None:
        prompt = tuple(token for token in tokens if token < model.config.vocab_size)[:20] or (3,)
        generate(model, prompt)
        with refused() as said:
            found = find_drafter("auto", str(folder))
            if found is None:
                raise UserError("it has no drafter any more")
            drafter = load_drafter(found, model)
            assert all(bool(p.isfinite().all()) for p in drafter.parameters())
            assert drafter.vocab is None or bool((drafter.vocab < model.config.vocab_size).all())
            done += 1
        no += len(said)
    with refused() as said:
        export_policy(str(folder), out / "policy")
        done += 1
    no += len(said)
    with refused() as said:
        export_drafter(str(folder), out / "drafter", form, depth=3)
        done += 1
    return done, no + len(said)


def generate(model, prompt) -> None:
    longest = min(model.config.max_positions, 64)
    if len(prompt) >= longest - 2:
        prompt = prompt[: max(1, longest - 4)]
    if longest < len(prompt) + 2:
        return
    engine = RolloutEngine(model, EngineSettings(max_batch=1, max_length=longest, kv_bytes=64 << 20))
    (answer,) = engine.run([Request(0, prompt, SamplingParams(1.0, max_tokens=2), 0)])
    assert all(map(torch.isfinite, torch.tensor(answer.logprobs))), "a model that was taken writes numbers"


def sound(out) -> None:
    """What was exported holds finite weights in full precision, and nothing of anybody else's."""
    for file in out.rglob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert tensor.is_floating_point() or name in ("d2t", "t2d") or "embed" in name, name
            if tensor.is_floating_point():
                assert tensor.element_size() > 1 and bool(tensor.isfinite().all()), name
    for file in out.rglob("*"):
        assert not file.is_symlink()
        if file.is_file():
            assert b"CANARY" not in file.read_bytes()


def trial(seed: int, bases, place) -> tuple[int, int]:
    r = random.Random(seed)
    base, outside = bases[r.random() < 0.85]
    folder, out = place / "model", place / "out"
    copy_base(base, folder)
    watch = Watch(outside)
    faults = [damage(r, folder, outside) for _ in range(r.choice((1, 1, 1, 2, 3)))]
    watch.opened()  # whatever damage itself did
    try:
        with deadline():
            counts = use(folder, out, r.choice(FORMATS))
        assert not watch.opened(), "files outside of the folder were opened"
        sound(out)
    except BaseException as err:
        err.add_note(f"seed {seed}: {base.name}, {faults}")
        raise
    finally:
        watch.close()
        shutil.rmtree(folder)
        shutil.rmtree(out, ignore_errors=True)
    return counts


def run(seeds: range, bases, place) -> None:
    done = no = 0
    for seed in seeds:
        worked, was_refused = trial(seed, bases, place)
        done += worked
        no += was_refused
    assert min(done, no) > 0.3 * len(seeds), "both kinds should occur"


def test_the_folders_work_undamaged(bases, tmp_path):
    for base, outside in bases:
        assert use(base, tmp_path / base.name, "vllm") == (5, 0)
        assert use(outside, tmp_path / outside.name, "speculators") == (5, 0)
        sound(tmp_path / base.name)


def test_damaged_model_folders(bases, tmp_path):
    run(range(150), bases, tmp_path)


@pytest.mark.soak
def test_many_damaged_model_folders(bases, tmp_path):
    run(range(10_000, 13_000), bases, tmp_path)
