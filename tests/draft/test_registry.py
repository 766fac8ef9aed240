"""A drafter of one's own is one class and one line in the registry, and runs wherever the settings are read."""

from __future__ import annotations

import pytest

from paceline.config import load_config
from paceline.draft import registry
from paceline.draft.base import BaseDrafter, Draft, MemoryRequest
from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.suffix.drafter import SuffixDrafter
from paceline.errors import UserError
from paceline.setup.build import make_drafter, make_engine
from tests.rollout.reasoner import problems, reasoner

SETTINGS = ["speculation.drafter=none", "speculation.suffix=false", "rollout.max_batch=4", "rollout.max_tokens=40"]


class RepeatDrafter(BaseDrafter):
    """Proposes the last token again and again."""

    name = "repeat"
    default_strategies = ("repeat:2",)

    def propose(self, sequences, strategy):
        draft = Draft.empty(len(sequences), strategy.nodes)
        for row, sequence in enumerate(sequences):
            draft.tokens[row] = sequence.tokens[-1]
        return draft


@pytest.fixture
def repeat(monkeypatch):
    monkeypatch.setitem(registry.REGISTRY, "repeat", RepeatDrafter)


def completions(engine, requests):
    return {c.request.id: (c.tokens, c.finish_reason) for c in engine.run(requests)}


def test_a_new_drafter_runs_as_train_runs_it(repeat):
    """From a recipe's settings to completions, as workers do it."""
    model, requests = reasoner("float64"), problems(6, 40)
    config = load_config(None, [*SETTINGS, "speculation.strategies=[plain, 'repeat:1', 'repeat:3']"])
    engine = make_engine(model, config, None, make_drafter(model, config))
    assert list(engine.drafters) == ["repeat"]
    engine.choose = lambda batch: Strategy.parse("repeat:3")
    drafted = completions(engine, requests)
    assert engine.stats.rounds["repeat:3"] > 10 and engine.stats.drafted_sequences > 10
    plain = load_config(None, [*SETTINGS, "speculation.mode=plain"])
    assert drafted == completions(make_engine(model, plain, None, None), requests)
    engine.choose = None  # the tuner chooses
    again = completions(engine, requests)
    assert again == drafted


def test_it_is_on_only_where_a_strategy_names_it(repeat):
    settings = load_config(None, SETTINGS).speculation
    assert registry.enabled_drafters(settings, has_network=False) == []
    named = load_config(None, [*SETTINGS, "speculation.strategies=['repeat:1']"]).speculation
    assert registry.enabled_drafters(named, has_network=False) == ["repeat"]
    assert registry.choose_strategies(named, has_network=False) == [Strategy.parse("repeat:1")]
    assert registry.default_strategies(["repeat"]) == [PLAIN, Strategy.parse("repeat:2")]


def test_a_strategy_without_its_drafter_is_refused():
    config = load_config(None, [*SETTINGS, "speculation.strategies=['unheard_of:3']"])
    with pytest.raises(UserError, match="needs the drafter 'unheard_of'"):
        make_engine(reasoner(), config, None, None)


def test_names_are_what_they_are_registered_by():
    assert {"suffix": SuffixDrafter, "neural": EagleDrafter} == registry.REGISTRY
    for name, kind in registry.REGISTRY.items():
        assert kind.name == name
        assert all(Strategy.parse(text).drafter == name for text in kind.default_strategies)


def test_memory_is_planned_for_drafters_that_take_some(repeat):
    model, config = reasoner().to("meta"), load_config(None, [])
    planned = registry.plan_memory(MemoryRequest(model, config.speculation, "embedded", 8))
    assert list(planned) == ["neural"] and planned["neural"].parameters > 0
    none = load_config(None, ["speculation.drafter=none"]).speculation
    assert registry.plan_memory(MemoryRequest(model, none, "embedded", 8)) == {}
