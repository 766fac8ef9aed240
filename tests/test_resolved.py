"""RUN/config.yaml leaves nothing open that was decided, and a resumed run decides again what it must."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml

from paceline.config import Config, flat, load_config
from paceline.config.renamed import RENAMED
from paceline.errors import RenamedSetting, UserError
from paceline.loop import TrainLoop, train
from paceline.report.rundata import read_run
from paceline.run import Run
from paceline.setup.decide import decide_for_device
from paceline.setup.decisions import FILE

from .conftest import tiny_model
from .digits import DIGITS
from .test_cli import rows

SMALL = [
    "steps=1", "rollout.prompts=2", "rollout.samples=2", "rollout.max_tokens=16", "log.tensorboard=false", DIGITS,
    "task.difficulty=easy", "checkpoint.every=1",
]  # fmt: skip
OPEN = {
    "task.problems": "there is no limit: a problem never comes twice",
    "task.system": "there is no system message",
    "task.template": "a column is the prompt",
    "task.max_prompt_tokens": "there is no limit but the model's context",
    "speculation.graph_memory_gb": "there is no limit",
    "rollout.vllm_python": "vLLM, where it is used at all, is where Paceline is",
    "environment.name": "there is no environment",
    "cluster.address": "Ray is started on this machine, where it is used at all",
    "log.wandb": "it is not used",
    "log.trackio": "it is not used",
    "eval.task": "nothing is evaluated",
    "eval.prompts": "there is no limit, where there are rows",
    "learn.lora.rank": "all weights are trained",
    "learn.lora.alpha": "there are no adapters",
    "learn.lora.path": "there is no adapter to begin with",
    "learn.lora.base": "there are no adapters",
}
"""What `null` means where it stays."""
NO_EVALUATION = dict.fromkeys(("eval.temperature", "eval.max_tokens", "eval.k"), "nothing is evaluated")
NO_TRAINING = {"spot.drafter_lr": "no drafter is trained"}


def saved(run: Path) -> dict:
    return dict(flat(yaml.safe_load((run / "config.yaml").read_text())))


def left_open(settings: dict) -> set[str]:
    opened = {key for key, value in settings.items() if value is None or value == "auto"}
    return opened - NO_EVALUATION.keys() if settings["eval.task"] is None else opened


def test_the_table_is_of_settings_that_exist():
    can_be_open = left_open(dict(flat(Config().model_dump(mode="json"))))
    assert OPEN.keys() <= can_be_open


CASES = {
    "the default recipe": ([], {}),
    "no recipe": (["model.path={own}", "reward.functions=[]"], NO_TRAINING),
    "evaluated": (["cluster.workers=1", "eval.task=countdown", "eval.prompts=1"], NO_TRAINING),
    "one worker": (["cluster.workers=1"], NO_TRAINING),
    "an untrained drafter": (["cluster.workers=1", "speculation.drafter=new"], {}),
    "no drafter": (["cluster.workers=1", "speculation.drafter=none", "speculation.suffix=false"], NO_TRAINING),
    "adapters": (["cluster.workers=1", "learn.lora.rank=2", "learn.lora.targets=[v_proj, q_proj]"], NO_TRAINING),
    "plain": (["cluster.workers=1", "speculation.mode=plain"], NO_TRAINING),
    "dapo": (["cluster.workers=1", "learn.algorithm=dapo", "learn.aggregate=null"], NO_TRAINING),
    "no importance weights": (
        ["cluster.workers=1", "learn.importance_sampling_cap=null"],
        NO_TRAINING | {"learn.importance_sampling_cap": "it is off"},
    ),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    from paceline.model import save_model
    from paceline.model.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("own")
    tokenizer = load_tokenizer("embedded")
    save_model(tiny_model(vocab_size=len(tokenizer.hf)), folder)
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_open_that_was_decided(case, own, tmp_path):
    words, more = CASES[case]
    run = tmp_path / "run"
    config = load_config(None, [*SMALL, f"run_dir={run}", *(word.format(own=own) for word in words)])
    train(config)
    settings = saved(run)
    assert left_open(settings) <= OPEN.keys() | more.keys()
    assert settings["cluster.workers"] >= 1 and settings["rollout.kv_memory_gb"] > 0
    given = Run.open(run).given()
    assert given == config.model_copy(update={"run_dir": str(run)}), "what was given can be told from what was decided"
    assert Run.open(run).config.model_dump() != given.model_dump()


@pytest.mark.soak
def test_hosts_of_a_ray_cluster_decide_for_themselves(tmp_path):
    pytest.importorskip("ray")
    run = tmp_path / "run"
    train(load_config(None, [*SMALL, "cluster.workers=2", "cluster.backend=ray", f"run_dir={run}"]))
    assert left_open(saved(run)) - OPEN.keys() == {"model.threads", "rollout.kv_memory_gb"}


def test_it_is_written_before_workers_start(tmp_path, monkeypatch):
    from paceline.cluster.cluster import Cluster

    run = tmp_path / "run"
    seen = []
    original = Cluster.start
    monkeypatch.setattr(Cluster, "start", lambda self: seen.append(saved(run)) or original(self))
    train(load_config(None, [*SMALL, "cluster.workers=1", f"run_dir={run}"]))
    assert seen == [saved(run)] and left_open(seen[0]) <= OPEN.keys() | NO_TRAINING.keys()


def test_what_is_written_is_what_runs(tmp_path):
    words = [*SMALL, "cluster.workers=1", "model.dtype=float64", f"run_dir={tmp_path / 'run'}"]
    run = Run.create(load_config(None, words))
    trainer = TrainLoop(run.config, run)
    try:
        settings, worker = saved(run.folder), trainer.cluster.transport.worker
        engine = worker.rollout.adaptive
        assert settings["rollout.page_size"] == engine.pool.page_size
        assert settings["model.threads"] == torch.get_num_threads()
        assert settings["speculation.strategies"] == [str(s) for s in engine.strategies]
        assert settings["model.device"] == str(worker.model.device)
        wanted = engine.settings.max_batch * (-(-engine.max_length // engine.pool.page_size) + 1) + 1
        assert engine.pool.pages == wanted, "as many as without a limit"
        assert Run.open(run.folder).config == trainer.config
    finally:
        trainer.close()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_workers(before, after, tmp_path):
    """What follows from their number is decided again: with one worker there is nobody to train in the tail."""
    run = tmp_path / "run"
    train(load_config(None, [*SMALL, f"cluster.workers={before}", f"run_dir={run}"]))
    assert saved(run)["spot.when"] == ("off" if before == 1 else "tail")
    edit(run, f"workers: {before}\n  backend", f"workers: {after}\n  backend")
    edit(run, "steps: 1\n", "steps: 2\n")
    train(load_config(None), resume=run)
    assert [row["step"] for row in rows(run)] == [1, 2]
    settings = saved(run)
    assert (settings["cluster.workers"], settings["spot.when"]) == (after, "off" if after == 1 else "tail")
    if after == 1:
        assert settings["model.threads"] == torch.get_num_threads()


def edit(run: Path, old: str, new: str) -> None:
    text = (run / "config.yaml").read_text()
    assert text.count(old) == 1, old
    (run / "config.yaml").write_text(text.replace(old, new))


def test_what_was_edited_stays(tmp_path):
    run = tmp_path / "run"
    train(load_config(None, [*SMALL, "cluster.workers=1", f"run_dir={run}"]))
    before = saved(run)
    edit(run, f"kv_memory_gb: {before['rollout.kv_memory_gb']}", "kv_memory_gb: 0.25")
    edit(run, "steps: 1\n", "steps: 2\n")
    train(load_config(None), resume=run)
    assert saved(run) == before | {"rollout.kv_memory_gb": 0.25, "steps": 2}
    assert read_run(run).changed_settings()["rollout.kv_memory_gb"] == (0.25, None)


def test_a_run_whose_settings_are_open_still_goes_on(tmp_path):
    """One of an earlier version, or one that was killed before anything was decided."""
    run = tmp_path / "run"
    config = load_config(None, [*SMALL, "cluster.workers=1", f"run_dir={run}"])
    train(config)
    (run / FILE).unlink()
    open_again = config.model_copy(update={"run_dir": str(run), "steps": 2})
    (run / "config.yaml").write_text(yaml.safe_dump(open_again.model_dump(mode="json")))
    train(load_config(None), resume=run)
    assert left_open(saved(run)) <= OPEN.keys() | NO_TRAINING.keys() and len(rows(run)) == 2


def test_killed_between_the_two_files(tmp_path, monkeypatch):
    """Whatever was written by then, a decision never looks as if it had been given."""
    run = Run.create(load_config(None, ["cluster.workers=1", f"run_dir={tmp_path / 'run'}"]))
    given = run.config
    first = decide_for_device(given, torch.device("cpu"))
    second = first.model_copy(update={"rollout": first.rollout.model_copy(update={"page_size": 7})})
    kept = ["model.device", "model.dtype"]
    run.write_config(given, first, kept)
    original = os.replace
    for writes in range(4):
        left = [writes]

        def replace(source, target, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            original(source, target)

        with monkeypatch.context() as patch:
            patch.setattr("pathlib.os.replace", replace)
            try:
                run.write_config(given, second, kept)
            except KeyboardInterrupt:
                assert writes < 3
        assert Run.open(run.folder).given() == given
        assert Run.open(run.folder).config.model.device == "cpu", "what is kept is never open again"
        run.write_config(given, first, kept)


@pytest.mark.parametrize("text", ["- 1", "a: 1", "model.device: {given: auto}", "[", "x: {given: 1, decided: 2, z: 3}"])
def test_a_damaged_record(text, tmp_path):
    run = Run.create(load_config(None, [f"run_dir={tmp_path / 'run'}"]))
    (run.folder / FILE).write_text(text)
    with pytest.raises(UserError, match=FILE):
        run.given()
    with pytest.raises(UserError, match=FILE):
        read_run(run.folder)


def test_names_that_no_setting_has_are_passed_over(tmp_path):
    run = Run.create(load_config(None, [f"run_dir={tmp_path / 'run'}"]))
    (run.folder / FILE).write_text("steps.x.y: {given: 1, decided: 2}\nnothing: {given: 1, decided: null}\n")
    assert run.given() == run.config


def test_the_report_shows_what_was_given(tmp_path):
    run = tmp_path / "run"
    train(load_config(None, [*SMALL, "cluster.workers=1", f"run_dir={run}"]))
    changed = read_run(run).changed_settings()
    recipe = dict(flat(load_config("default").model_dump(mode="json")))
    defaults = dict(flat(Config().model_dump(mode="json")))
    typed = {word.partition("=")[0] for word in SMALL}
    assert set(changed) <= typed | {key for key, value in recipe.items() if value != defaults[key]}


def test_a_run_with_the_names_that_settings_had_before_is_resumed(tmp_path):
    """Its config.yaml and decided.yaml are read by the earlier names, and written again by the present ones."""
    folder = tmp_path / "run"
    words = [*SMALL, "cluster.workers=1", "learn.importance_sampling_cap=1.5", "spot.max_interval=3"]
    train(load_config(None, [*words, "steps=1", f"run_dir={folder}"]))
    config, decided = folder / "config.yaml", folder / "decided.yaml"
    text = config.read_text().replace("steps: 1\n", "steps: 2\n")
    for old, new in RENAMED.items():
        name = f"  {new.rpartition('.')[2]}:"
        assert name in text
        text = text.replace(name, f"  {old.rpartition('.')[2]}:")
    config.write_text(text)
    decided.write_text(decided.read_text() + "learn.is_cap:\n  given: 2.0\n  decided: 1.5\n")
    with pytest.warns(RenamedSetting):
        run = Run.open(folder)
    assert run.config.learn.importance_sampling_cap == 1.5 and run.config.spot.max_interval == 3
    assert run.given().learn.importance_sampling_cap == 2.0, "what decided.yaml says by the earlier name"
    with pytest.warns(RenamedSetting):
        train(run.config, resume=folder)
    assert Run.open(folder).restore().step == 2
    written = saved(folder)
    assert set(RENAMED.values()) <= written.keys() and not set(RENAMED) & written.keys()
