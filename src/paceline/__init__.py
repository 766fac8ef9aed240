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
    from paceline.tasks.judge import Judge
    from paceline.tasks.reward_call import per

__all__ = ["Drafter", "Engine", "Judge", "StepInfo", "Trainer", "__version__", "per"]

_MODULES = {
    "Drafter": "library.drafter",
    "Engine": "library.engine",
    "Judge": "tasks.judge",
    "StepInfo": "observe.hooks",
    "Trainer": "library.trainer",
    "per": "tasks.reward_call",
}


def __getattr__(name: str) -> Any:
    """Torch and all that comes with it is loaded when it is first asked for: commands that need none start at once."""
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    choose_waiting()
    return getattr(importlib.import_module(f"paceline.{_MODULES[name]}"), name)
