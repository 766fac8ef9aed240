"""Paceline: reinforcement learning for reasoning language models without waiting for the slowest answer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.process.waiting import choose_waiting
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.library.drafter import Drafter
    from paceline.library.engine import Engine
    from paceline.library.trainer import Trainer
    from paceline.observe.hooks import StepInfo

__all__ = ["Drafter", "Engine", "StepInfo", "Trainer", "__version__"]

_MODULES = {
    "Drafter": "library.drafter",
    "Engine": "library.engine",
    "StepInfo": "observe.hooks",
    "Trainer": "library.trainer",
}


def __getattr__(name: str) -> Any:
    """Torch and all that comes with it is loaded when it is first asked for: commands that need none start at once."""
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    choose_waiting()
    return getattr(importlib.import_module(f"paceline.{_MODULES[name]}"), name)
