"""Calls from a program to the scheduler of its vLLM engine, which mostly runs in a process of its own."""

from __future__ import annotations

from typing import Any

from paceline.errors import UserError


def tuner_state(llm: Any) -> dict[str, Any] | None:
    """What the tuner of a `vllm.LLM` has found: present depth, accept length, steps by depth, share of time that trials
    have taken. None where it is off."""
    found: dict[str, Any] | None = _call(llm, "paceline_tuner_state")
    return found


def drafter_changed(llm: Any) -> None:
    """Tell the tuner of a `vllm.LLM` that its drafter has other weights now."""
    _call(llm, "paceline_drafter_changed")


def _call(llm: Any, method: str) -> Any:
    client = llm.llm_engine.engine_core
    inside = getattr(client, "engine_core", None)  # in the same process
    if inside is None:
        return client.call_utility(method)
    if not hasattr(inside, method):
        raise UserError("vLLM has not loaded Paceline's plug-in: VLLM_PLUGINS must be unset or name paceline")
    return getattr(inside, method)()
