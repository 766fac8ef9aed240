"""Paceline inside vLLM, by vLLM's own hooks: the tuner as its scheduler, a drafter that follows the policy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.integrations.vllm.versions import installed_version

if TYPE_CHECKING:
    from paceline.integrations.vllm.engine_calls import drafter_changed, tuner_state
    from paceline.integrations.vllm.options import paceline_options
    from paceline.integrations.vllm.scheduler import TunedScheduler

__all__ = ["TunedScheduler", "drafter_changed", "paceline_options", "tuner_state"]

_MODULES = {
    "TunedScheduler": "scheduler",
    "drafter_changed": "engine_calls",
    "paceline_options": "options",
    "tuner_state": "engine_calls",
}


def __getattr__(name: str) -> Any:
    """vLLM is imported when it is first needed."""
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline.integrations.vllm' has no attribute '{name}'")
    installed_version()  # without vLLM, one sentence
    return getattr(importlib.import_module(f"paceline.integrations.vllm.{_MODULES[name]}"), name)
