"""All drafters by name. A new one is a class (`draft.base`) and a line in `REGISTRY`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.files import load_drafter
from paceline.draft.eagle.model import NEW_WINDOW, EagleModel, new_drafter
from paceline.draft.eagle.vocabulary import choose_tokens
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.suffix.drafter import SuffixDrafter

if TYPE_CHECKING:
    from paceline.config import SpeculationConfig
    from paceline.draft.base import BaseDrafter, DrafterMemory, DrafterSetup, MemoryRequest
    from paceline.model.decoder import Decoder

REGISTRY: dict[str, type[BaseDrafter]] = {
    "suffix": SuffixDrafter,
    "neural": EagleDrafter,
}
"""In the order in which their strategies are listed."""


def enabled_drafters(settings: SpeculationConfig, has_network: bool) -> list[str]:
    """Names of the drafters that the settings ask for; `has_network` tells whether there are trained weights."""
    if settings.mode == "plain":
        return []
    return [name for name, kind in REGISTRY.items() if kind.is_enabled(settings, has_network)]


def make_drafters(setup: DrafterSetup) -> list[BaseDrafter]:
    """Those that the settings ask for, for one engine."""
    return [REGISTRY[name].make(setup) for name in enabled_drafters(setup.settings, setup.network is not None)]


def make_network(policy: Decoder, folder: Path | None, seed: int) -> EagleModel:
    """The weights of the drafter that has some: those in `folder`, or new ones."""
    if folder is not None:
        return load_drafter(folder, policy)
    return new_drafter(policy, NEW_WINDOW, seed, choose_tokens(policy))


def default_strategies(drafters: Iterable[str]) -> list[Strategy]:
    """Plain decoding, and for each drafter a few that pay at different batch sizes."""
    names = (strategy for name in drafters if name in REGISTRY for strategy in REGISTRY[name].default_strategies)
    return [PLAIN, *map(Strategy.parse, names)]


def choose_strategies(settings: SpeculationConfig, has_network: bool) -> list[Strategy]:
    """Those that the settings name, or the defaults of the drafters that they ask for."""
    if settings.mode == "plain":
        return [PLAIN]
    if settings.strategies is not None:
        return [Strategy.parse(text) for text in settings.strategies]
    return default_strategies(enabled_drafters(settings, has_network))


def plan_memory(request: MemoryRequest) -> dict[str, DrafterMemory]:
    """Device memory by drafter, for those that take some."""
    planned = {name: kind.plan_memory(request) for name, kind in REGISTRY.items()}
    return {name: memory for name, memory in planned.items() if memory is not None}
