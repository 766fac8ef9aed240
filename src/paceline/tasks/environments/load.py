"""From names in the settings to a toolbox."""

from __future__ import annotations

from functools import partial
from typing import Any

from paceline.errors import UserError
from paceline.tasks.environments.messages import ToolboxSpec
from paceline.tasks.environments.toolbox import Loop, Toolbox
from paceline.tasks.environments.tools import Tool, as_tool
from paceline.tasks.imports import import_named

BUILT_IN = {"grid": "paceline.tasks.grid.environment:GridEnvironment"}


def load_toolbox(spec: ToolboxSpec) -> Toolbox:
    """Import everything; what cannot be, is said."""
    make = None
    if spec.environment is not None:
        name = BUILT_IN.get(spec.environment, spec.environment)
        _check_name(name, "environment.name", f"{', '.join(BUILT_IN)}, or your own as ")
        make = partial(import_named(name, "the environment"), **spec.options)
    loop = Loop()
    tools: dict[str, Tool] = {}
    for name in spec.tools:
        _check_name(name, "environment.tools", "")
        _add(tools, as_tool(import_named(name, "the tool")))
    if spec.mcp:
        from paceline.tasks.environments.mcp import connect

        for command in spec.mcp:
            for tool in connect(command, loop, spec.start_timeout_s):
                _add(tools, tool)
    return Toolbox(make, tools, spec.family, spec.max_chars, loop)


def _add(tools: dict[str, Tool], tool: Tool) -> None:
    if tool.name in tools:
        raise UserError(f"two tools are called '{tool.name}'; a model could not tell them apart")
    tools[tool.name] = tool


def _check_name(name: Any, setting: str, others: str) -> None:
    module, colon, attribute = name.rpartition(":")
    if not (module and colon and attribute):
        raise UserError(f"{setting} = '{name}' names nothing: use {others}module:name or file.py:name")
