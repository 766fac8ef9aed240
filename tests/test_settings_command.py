"""Names from elsewhere, `paceline settings`, `recipes`, `runs`, `generate RUN`, and JSON only where it is asked for."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import __version__
from paceline.config import Config, find_settings, load_config, read_recipes, recipe_names, setting_names
from paceline.config.foreign import ENGINES, FOREIGN, TRL, VERL, as_setting, find_foreign, markdown_table
from paceline.config.kinds import kinds
from paceline.config.training import LearnConfig
from paceline.errors import UserError
from paceline.learn.algorithms import ALGORITHMS
from paceline.model.config import DecoderConfig
from paceline.run import Run
from paceline.run.state import find_runs, is_running, write_end
from paceline.setup.memory import DeviceMemory, plan_memory

from .test_cli import QUICK, here, wait_for

DOCS = Path(__file__).parents[1] / "docs"


# One table


def test_the_table_names_what_exists_and_each_name_once():
    for library in (TRL, VERL, ENGINES):
        names = [one.name for one in FOREIGN if one.library == library]
        assert len(set(names)) == len(names)
    arguments = {"--resume RUN"}
    wrong = [one for one in FOREIGN if one.here and as_setting(one) not in {*setting_names(), *arguments}]
    assert not wrong
    assert all(one.here or one.note for one in FOREIGN), "what has no counterpart says why"


@pytest.mark.parametrize(("page", "library"), [("from-trl.md", TRL), ("from-verl.md", VERL)])
def test_the_docs_have_the_table(page, library):
    assert markdown_table(library) in (DOCS / page).read_text(encoding="utf-8")


def test_names_of_trl_exist_there():
    trl = pytest.importorskip("trl")
    arguments = inspect.signature(trl.GRPOTrainer.__init__).parameters
    theirs = {*trl.GRPOConfig.__dataclass_fields__, *arguments, "model_name_or_path", "dataset_name"}
    earlier = {"max_prompt_length", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"}
    assert not {one.name for one in FOREIGN if one.library == TRL} - theirs - earlier


MEANT = {
    "learning_rate=1e-6": "setting 'learning_rate' on the command line; TRL's 'learning_rate' is 'learn.lr' here",
    "beta=0.1": "TRL's 'beta' is 'learn.kl_coef' here",
    "num_generations=8": "TRL's 'num_generations' is 'rollout.samples' here",
    "use_vllm=true": "TRL's 'use_vllm' has no counterpart here: the rollout engine is built in",
    "actor_rollout_ref.rollout.n=8": "verl's 'actor_rollout_ref.rollout.n' is 'rollout.samples' here",
    "actor.ppo_epochs=2": "verl's 'actor_rollout_ref.actor.ppo_epochs' is 'learn.epochs' here",
    "rollout.n=8": "verl's 'actor_rollout_ref.rollout.n' is 'rollout.samples' here",
    "max_new_tokens=9": "'max_new_tokens' is 'rollout.max_tokens' here",
    "gpu_memory_utilization=0.9": "'rollout.kv_memory_gb' here (in GB; null takes what is left)",
    "--steps 5": "--steps 5 is not an option: settings are written as key=value, here steps=5",
    "--learning_rate 1e-6": "here learn.lr=1e-6",
    "--learning-rate=1e-6": "here learn.lr=1e-6",
    "--rollout.samples 8": "here rollout.samples=8",
    "--per-device-train-batch-size 4": "here rollout.prompts=4 (prompts, not completions",
    "--use_vllm": "TRL's use_vllm is not a setting here; the rollout engine is built in",
    "--resume_from_checkpoint x": "write --resume RUN",
    "--resum x": "did you mean --resume?",
    "--qwertz": "`paceline settings WORD` finds one",
    "-n 4": "settings are written as key=value",
}


@pytest.mark.parametrize("words", MEANT)
def test_names_from_elsewhere_are_understood(words, capsys):
    assert here("train", *words.split()) == 2
    said = capsys.readouterr().err
    assert MEANT[words] in said and said.count("\n") == 1


def test_in_recipes_and_from_python_too(tmp_path):
    from paceline import Trainer

    (recipe := tmp_path / "r.yaml").write_text("actor_rollout_ref:\n  rollout: {n: 8}\n")
    with pytest.raises(UserError, match=r"r.yaml; verl's 'actor_rollout_ref.rollout.n' is 'rollout.samples' here"):
        load_config(str(recipe))
    with pytest.raises(UserError, match=r"Trainer\(...\); TRL's 'beta' is 'learn.kl_coef' here"):
        Trainer("mine", settings={"beta": 0.1})
    assert find_foreign("lr") is None, "only whole names"


# Lists


def test_settings_by_word(capsys):
    assert here("settings", "num_generations") == 0
    said = capsys.readouterr().out
    assert said.startswith("rollout.samples = 8   whole number from 1\n")
    assert "verl: actor_rollout_ref.rollout.n" in " ".join(said.split()) and said.count(" = ") == 1
    assert here("settings", "cosine") == 0, "a choice"
    assert "learn.lr_scheduler = constant   one of constant, linear, cosine" in capsys.readouterr().out
    assert here("settings", "sampels") == 2
    assert "did you mean" in capsys.readouterr().err
    assert here("settings", "use_vllm") == 2
    assert "built in" in capsys.readouterr().err
    assert here("settings", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == setting_names() == list(kinds(Config.model_json_schema()))
    assert all(row["type"] and row["description"] for row in rows)


def test_the_choices_of_the_algorithm_are_listed():
    text = LearnConfig.model_fields["algorithm"].description
    assert all(f"`{name}`" in text for name in ALGORITHMS)
    assert [one.name for one in find_settings("reinforce_pp")] == ["learn.algorithm"]


def qwen(layers: int, hidden: int, heads: int, kv: int, inner: int, tied: bool) -> DecoderConfig:
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 151936}
    more = {"num_key_value_heads": kv, "intermediate_size": inner, "max_position_embeddings": 32768}
    rest = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": 151645, "tie_word_embeddings": tied}
    return DecoderConfig.from_hf({"model_type": "qwen2"} | shape | more | rest)


NEEDS = {
    "gsm8k-qwen2.5-0.5b": (24, lambda: qwen(24, 896, 14, 2, 4864, True)),
    "dapo-math-7b": (141, lambda: qwen(28, 3584, 28, 4, 18944, False)),
}
"""What recipes say in GB, and the model that they name."""


def test_recipes_say_what_they_need(capsys):
    recipes = read_recipes()
    assert [one.name for one in recipes] == recipe_names() and len(recipes) >= 4
    assert all(len(one.about.split()) > 5 and one.needs for one in recipes)
    assert here("recipes") == 0
    said = capsys.readouterr().out
    assert all(one.name in said for one in recipes) and "one GPU with 24 GB" in said
    assert here("recipes", "--json") == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == set(recipe_names())


@pytest.mark.parametrize("name", NEEDS)
def test_what_they_need_is_enough(name):
    from paceline.learn.algorithms import resolve

    gigabytes, shape = NEEDS[name]
    assert f"{gigabytes} GB" in {one.name: one for one in read_recipes()}[name].needs
    config = resolve(load_config(name, ["model.dtype=bfloat16", "model.device=cpu"]))
    plan = plan_memory(config, shape(), DeviceMemory("a card", gigabytes * 10**9, True))
    assert plan.fits, plan.line()
    assert plan.least > 0.5 * gigabytes * 1e9 or gigabytes <= 24, "and not far too much"


def test_every_recipe_but_the_demo_names_its_parts():
    for name in recipe_names():
        config = load_config(name)
        has_own = config.task.name == "countdown" or config.task.name.startswith("forecast:")
        assert config.reward.functions or has_own, name
        assert config.learn.overlong_penalty == Config().learn.overlong_penalty or name == "default"


# Runs


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    assert here("train", *QUICK, "steps=2", f"run_dir={folder}", "--quiet") == 0
    return folder


def test_quiet_is_quiet(tmp_path, capsys):
    assert here("train", "--quiet", *QUICK, "steps=1", f"run_dir={tmp_path / 'run'}") == 0
    said = capsys.readouterr()
    assert not said.out and not said.err and (tmp_path / "run" / "report.html").exists()
    assert here("train", "--quiet", "seed=x") == 2
    assert "seed" in capsys.readouterr().err


def test_runs_are_listed_with_their_state(run, tmp_path, capsys):
    assert [(one.state, one.step, one.steps) for one in find_runs(run.parent)] == [("finished", 2, 2)]
    assert find_runs(run) == find_runs(run.parent)
    other = Run.create(load_config(None, [f"run_dir={tmp_path / 'other'}"]))
    assert [one.state for one in find_runs(tmp_path)] == ["running"] and is_running(other.folder)
    other.unlock()
    assert [one.state for one in find_runs(tmp_path)] == ["stopped"], "or killed"
    write_end(other.folder, "failed", "a worker raised ValueError: no")
    (failed,) = find_runs(tmp_path)
    assert failed.state == "failed" and failed.why == "a worker raised ValueError: no"
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.yaml").write_text("[")
    assert here("runs", tmp_path) == 0
    said = capsys.readouterr().out
    assert "damaged" in said and "failed   step 0 of 21" in said and "a worker raised" in said
    assert here("runs", run.parent, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["state"] == "finished" and row["folder"] == str(run) and isinstance(row["reward"], float)
    assert here("runs", tmp_path / "nothing") == 2


def test_a_run_that_another_process_has(tmp_path):
    command = [sys.executable, "-m", "paceline", "train", *QUICK, "steps=100000", f"run_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), process)
        (one,) = find_runs(tmp_path)
        assert one.state == "running" and one.steps == 100000
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        (one,) = find_runs(tmp_path)
        assert one.state == "stopped" and one.step >= 1 and not one.why
        assert "SIGTERM" not in json.loads((tmp_path / "run" / "end.json").read_text())["why"]
    finally:
        process.kill()
        process.wait()


def test_a_run_that_failed_says_why_until_it_goes_on(tmp_path):
    (mine := tmp_path / "mine.py").write_text("def f(completions, **_):\n    raise ValueError('oops')\n")
    words = [*QUICK, "steps=1", f"run_dir={tmp_path / 'run'}", f"reward.functions=[{{function: '{mine}:f'}}]"]
    assert here("train", *words) == 1
    (one,) = find_runs(tmp_path)
    assert one.state == "failed" and "oops" in one.why
    mine.write_text("def f(completions, **_):\n    return [1.0] * len(completions)\n")
    assert here("train", "--resume", tmp_path / "run") == 0
    (one,) = find_runs(tmp_path)
    assert one.state == "finished" and not one.why and not (tmp_path / "run" / "end.json").exists()


# generate, version


def test_generate_from_a_run(run, tmp_path, capsys):
    words = ["--prompt", "Make 6 from 1 2 3.", "--max-tokens", "5", "--samples", "2", "--json"]
    assert here("generate", run, *words) == 0
    answers = json.loads(capsys.readouterr().out)
    assert len(answers) == 2 and answers[0].keys() == {"text", "tokens", "finish_reason"}
    assert here("generate", run / "checkpoints" / "step-000002", *words) == 0
    assert json.loads(capsys.readouterr().out) == answers
    assert here("generate", "embedded", *words) == 0
    empty = Run.create(load_config(None, [f"run_dir={tmp_path / 'empty'}"]))
    empty.unlock()
    assert here("generate", empty.folder, *words) == 2
    assert "has no checkpoint yet; name its model, embedded" in capsys.readouterr().err


def test_a_system_message(tmp_path, capsys):
    from .tied import make_tied

    model = make_tied(tmp_path / "model")
    words = ["generate", model, "--prompt", "2+2", "--max-tokens", "16", "--json"]
    said = []
    for more in ([], ["--system", "Count."]):
        assert here(*words, *more) == 0
        said.append(capsys.readouterr().out)
    assert said[0] != said[1]
    assert here(*words, "--system", "Count.", "--raw") == 2
    assert "--raw takes the prompt as it is" in capsys.readouterr().err


def test_version(capsys):
    assert here("--version") == 0
    assert capsys.readouterr().out == f"paceline {__version__}\n"


def test_json_only_where_it_is_asked_for(tmp_path, capsys):
    out = tmp_path / "out"
    assert here("export", "embedded", out) == 0
    assert "{" not in capsys.readouterr().out
    assert here("export", "embedded", out.with_name("again"), "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["format"] == "vllm" and "its card is" in said.err
    assert os.path.isfile(out / "config.json")
