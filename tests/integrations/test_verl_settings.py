"""What verl is told, and what Paceline's rollout adds to it; verl itself is not needed for that."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.errors import UserError
from paceline.integrations.verl import hydra_overrides, rollout_settings
from paceline.integrations.verl.settings import SCHEDULER, complete

ROOT = Path(__file__).parents[2]


def config(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**({"data_parallel_size": 1, "load_format": "dummy"} | changes))


def completed(engine: dict, **changes: object) -> dict:
    complete(engine, config(**changes))
    return engine


def test_a_drafter_is_enough():
    engine = completed({"speculative_config": {"model": "DRAFTER"}})
    assert engine == {
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 7, "model": "DRAFTER"},
        "scheduler_cls": SCHEDULER,
        "load_format": "auto",
    }


def test_what_was_said_stays():
    said = {
        "speculative_config": json.dumps({"model": "D", "method": "mtp", "num_speculative_tokens": 2}),
        "scheduler_cls": "mine.Scheduler",
        "load_format": "safetensors",
    }
    engine = completed(dict(said))
    assert engine["speculative_config"] == {"model": "D", "method": "mtp", "num_speculative_tokens": 2}
    assert {key: engine[key] for key in ("scheduler_cls", "load_format")} == {
        key: said[key] for key in ("scheduler_cls", "load_format")
    }
    assert "load_format" not in completed({"speculative_config": {"model": "D"}}, load_format="auto")


def test_matching_needs_no_drafter():
    assert completed({"speculative_config": {"method": "ngram"}})["speculative_config"]["method"] == "ngram"


@pytest.mark.parametrize(
    ("engine", "changes", "said"),
    [
        ({}, {}, "speculates, but has no drafter"),
        ({"speculative_config": {"method": "eagle3"}}, {}, "method eagle3 needs a drafter"),
        ({"speculative_config": "DRAFTER"}, {}, "speculative_config is not JSON"),
        ({"speculative_config": {"model": "D"}}, {"data_parallel_size": 2}, "rollout.data_parallel_size=2"),
    ],
)
def test_refusals(engine, changes, said):
    with pytest.raises(UserError, match=said) as error:
        complete(engine, config(**changes))
    assert len(str(error.value).splitlines()) == 1


def test_words_for_a_command_line():
    assert hydra_overrides(rollout_settings("D", 5, depths=[2, 5])) == [
        "actor_rollout_ref.rollout.name=paceline",
        f"++actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls={SCHEDULER}",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.method=eagle3",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.model=D",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.num_speculative_tokens=5",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.paceline.depths=[2, 5]",
    ]


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is here")
def test_the_entry_point_without_verl_is_one_warning(caplog):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with caplog.at_level(logging.WARNING, "verl.paceline"):
        importlib.import_module(project["entry-points"]["verl.plugins"]["paceline"])
    assert [record.getMessage().splitlines() for record in caplog.records] == [
        ["Paceline's plug-in does not fit this verl, so rollout.name=paceline is not known: No module named 'verl'"]
    ]
