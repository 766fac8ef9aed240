"""Settings: recipes, overrides, and one clear sentence for each way to get them wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.config import (
    Config,
    config_from,
    describe_recipe,
    describe_settings,
    load_config,
    recipe_names,
    setting_names,
)
from paceline.config.renamed import RENAMED
from paceline.errors import RenamedSetting, UserError
from paceline.learn.algorithms import ALGORITHMS, resolve


def test_every_shipped_recipe_loads():
    assert "default" in recipe_names()
    for name in recipe_names():
        load_config(name)


def test_every_setting_is_described():
    rows = describe_settings()
    assert len(rows) > 50 and all(text for _, _, text in rows), [n for n, _, t in rows if not t]


def test_overrides_come_last(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("steps: 7\nrollout: {samples: 2}\nlearn: {lr: 1e-5}\n")
    config = load_config(
        str(recipe), ["rollout.samples=9", "learn.lr=3e-4", "learn.kl_coef=0.5", "model.dtype=float64"]
    )
    assert (config.steps, config.rollout.samples, config.learn.lr, config.model.dtype) == (
        7,
        9,
        3e-4,
        "float64",
    )
    assert config.rollout.prompts == 16, "what nobody names keeps its default"


EMBEDDED = "settings: the recipe default (the embedded reasoner on Countdown)"
NONE = "settings: the defaults, no recipe"


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        (None, [], EMBEDDED),
        (None, ["steps=5"], EMBEDDED),
        (None, ["task.difficulty=tail", "model.dtype=float64"], EMBEDDED),
        (None, ["task={name: countdown, difficulty: tail}"], EMBEDDED),
        (None, ["task.name=data.jsonl", "model.dtype=float64"], NONE),
        (None, ["task={name: 'gym:chain_sum'}"], NONE),
        (None, ["model.path=embedded"], EMBEDDED),
        (None, ["model={dtype: float64}"], EMBEDDED),
        (None, ["model.path=mine", "model.path='embedded'"], EMBEDDED),
        (None, ["model.path=mine"], NONE),
        (None, ["steps=5", "model={path: owner/name}"], NONE),
        ("default", ["model.path=mine"], EMBEDDED),
    ],
)
def test_the_recipe_of_the_embedded_model_on_countdown_is_for_nothing_else(recipe, overrides, said):
    assert describe_recipe(recipe, overrides) == said
    config = load_config(recipe, overrides)
    if said == NONE:
        assert config.learn == Config().learn and config.rollout == Config().rollout
        assert config.cluster == Config().cluster
        assert config.steps == (5 if "steps=5" in overrides else 100)
    else:
        assert config.learn == load_config("default").learn and config.learn.lr > Config().learn.lr


def test_a_recipe_that_was_named_is_told(tmp_path):
    assert describe_recipe("mine.yaml", ["model.path=x"]) == "settings: the recipe mine.yaml"


def test_lists_and_nulls_on_the_command_line():
    config = load_config(
        None, ["rollout.stop=['a', 'b']", "learn.importance_sampling_cap=null", "reward.functions=[{function: math}]"]
    )
    assert config.rollout.stop == ["a", "b"] and config.learn.importance_sampling_cap is None
    assert config.reward.functions[0].weight == 1.0


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["rollout.temprature=1"],
            "unknown setting 'rollout.temprature' on the command line; did you mean 'rollout.temperature'?",
        ),
        (["rolout.samples=1"], "unknown setting 'rolout'"),
        (["lr=1"], "unknown setting 'lr' on the command line; did you mean 'learn.lr'?"),
        (
            ["rollout.samples=many"],
            "'rollout.samples' = 'many' on the command line does not work: it should be a valid integer",
        ),
        (["rollout.samples=0"], "greater than or equal to 1"),
        (["learn.lr=-1"], "'learn.lr' = -1 on the command line"),
        (["learn.algorithm=ppo"], "'grpo', 'dr_grpo'"),
        (["rollout.min_tokens=9", "rollout.max_tokens=3"], "min_tokens (9) is larger than max_tokens (3)"),
        (["steps.x=3"], "'steps.x' cannot be set"),
        (["samples"], "no recipe is called 'samples'"),
        (["=3"], "is not an override"),
        (["rollout.stop=[a"], "not valid YAML"),
    ],
)
def test_bad_overrides(overrides, problem):
    recipe = overrides[0] if "=" not in overrides[0] else None
    with pytest.raises(UserError) as err:
        load_config(recipe, [o for o in overrides if "=" in o])
    assert problem in str(err.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "rollout:\n  sampels: 3\n",
            "unknown setting 'rollout.sampels' in {}; did you mean 'rollout.samples'?",
        ),
        ("steps: [1", "is not valid YAML"),
        ("- 1\n- 2\n", "must hold settings"),
        ("rollout: 3\n", "'rollout' = 3 in {}"),
    ],
)
def test_bad_recipes(tmp_path, text, problem):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    with pytest.raises(UserError) as err:
        load_config(str(recipe))
    assert problem.format(recipe) in str(err.value)


def test_recipes_that_are_not_there():
    with pytest.raises(UserError, match=r"no recipe at nothing\.yaml"):
        load_config("nothing.yaml")
    with pytest.raises(UserError, match="did you mean 'default'"):
        load_config("defualt")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_fill_in_what_is_null(algorithm):
    config = resolve(load_config(None, [f"learn.algorithm={algorithm}", "learn.aggregate=null", "learn.clip_low=0.1"]))
    assert config.learn.clip_low == 0.1 and config.learn.aggregate == ALGORITHMS[algorithm].aggregate
    assert None not in (config.learn.clip_high, config.learn.dynamic_sampling, config.learn.overlong_buffer)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("learn.lr=.inf", "'learn.lr' = inf on the command line does not work: it should be a finite number"),
        ("learn.lr=.nan", "a finite number"),
        ("learn.lr=1e999", "a finite number"),
        ("learn.betas=[2, -1]", "'learn.betas.0' = 2 on the command line does not work: it should be less than 1"),
        ("rollout.temperature=.inf", "a finite number"),
        ("rollout.temperature=off", "YAML takes what was written for false"),
        ("rollout.stop=['']", "'rollout.stop.0' = '' on the command line does not work: it should have at least 1"),
        ("rollout.prompts=1000000", "is more than 1,048,576 answers per step"),
        ("reward.functions=[{function: math, weight: .nan}]", "'reward.functions.0.weight' = nan"),
        ("reward.timeout_s=1e9", "less than or equal to"),
        ("cluster.workers=100000", "less than or equal to 1024"),
        ("task.options={a: {b: [.inf]}}", "it holds a number that is not finite"),
        ("task.options={a: [2001-01-01]}", "it holds a date"),
        ("task.options={1: 2}", "the key 1 in the value of 'task.options' on the command line is not text"),
        ("speculation.strategies=[neural:5, fast]", "'fast' is not a strategy"),
        ("speculation.strategies=[neural:99]", "strategy 'neural:99' does not work"),
        ("seed=0x" + "f" * 5000, "a whole number with hundreds of digits"),
        ("steps=2001-99-99", "cannot be read: month must be in 1..12"),
        ("model.path=''", "at least 1 character"),
        ('model.path="a\\0b"', "a zero byte"),
        ("task.system=\udcff", "not valid YAML"),
        ("a\nb=1", "'a b' is not the name of a setting"),
        ("rollout.samples." + "x." * 30 + "y=1", "no setting has a name of 33 parts"),
    ],
)
def test_values_that_mean_nothing(override, problem):
    with pytest.raises(UserError) as err:
        load_config(None, [override])
    assert problem in str(err.value) and "\n" not in str(err.value)


def test_numbers_without_a_dot_are_numbers_and_names_stay_names():
    config = load_config(None, ["steps=1e3", "learn.lr=1e-5", "task.options={rate: 1e-3}", "run_dir='2024'"])
    assert (config.steps, config.learn.lr, config.task.options) == (1000, 1e-5, {"rate": 1e-3})
    assert config.run_dir == "2024"


def test_a_section_without_entries_is_empty(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("rollout:\n")
    assert load_config(str(recipe), ["rollout.samples=3"]).rollout.samples == 3


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_names_that_settings_had_before_keep_working(old, new, tmp_path):
    """In a recipe, an override, a section on the command line and in Python, each with a warning that says the new
    name; whatever comes last counts, by whichever name."""
    section, _, before = old.rpartition(".")
    now = new.rpartition(".")[2]
    value = {"lr_scheduler": "cosine"}.get(now, 3)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{section}:\n  {before}: {value}\n")
    get = lambda config: getattr(getattr(config, section), now)  # noqa: E731
    usual = get(Config())
    assert value != usual
    with pytest.warns(RenamedSetting, match=f"'{old}' in .*r.yaml is now called '{new}'"):
        assert get(load_config(str(recipe))) == value
    with pytest.warns(RenamedSetting, match=f"'{old}' in the command line is now called '{new}'"):
        assert get(load_config("default", [f"{old}={value}"])) == value
    with pytest.warns(RenamedSetting, match=new):
        assert get(load_config("default", [f"{section}={{{before}: {value}}}"])) == value
    with pytest.warns(RenamedSetting, match=f"in Trainer.* is now called '{new}'"):
        assert get(config_from({old: value}, "Trainer(...)")) == value
    with pytest.warns(RenamedSetting):
        assert get(load_config(str(recipe), [f"{new}={usual}"])) == usual
    recipe.write_text(f"{section}:\n  {now}: {value}\n")
    with pytest.warns(RenamedSetting):
        assert get(load_config(str(recipe), [f"{old}={usual}"])) == usual
    recipe.write_text(f"{section}:\n  {now}: {value}\n  {before}: {value}\n")
    with pytest.warns(RenamedSetting), pytest.raises(UserError, match=f"two names of one setting; keep '{new}'"):
        load_config(str(recipe))


def test_what_was_renamed_is_a_setting_and_nothing_else():
    assert set(RENAMED.values()) <= set(setting_names()) and not set(RENAMED) & set(setting_names())
    assert all(old.rpartition(".")[0] == new.rpartition(".")[0] for old, new in RENAMED.items())


def test_a_nearly_right_new_name_is_understood():
    with pytest.raises(UserError, match=r"did you mean 'learn\.importance_sampling_cap'"):
        load_config(None, ["learn.importance_sampling=2"])


def test_a_renamed_setting_is_one_line_on_the_terminal():
    command = [sys.executable, "-m", "paceline", "plan", "cluster.workers=1", "spot.rarely=4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "paceline: the setting 'spot.rarely' in the command line is now called 'spot.max_interval'\n"
