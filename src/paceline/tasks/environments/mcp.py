"""Tools of MCP servers over stdin and stdout, through the official SDK. A server is a process of the environment
process that started it, and ends with it."""

from __future__ import annotations

import asyncio
import importlib
import os
import shlex
from collections.abc import Mapping
from typing import Any

from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.tasks.environments.protocol import BadStep
from paceline.tasks.environments.toolbox import Loop
from paceline.tasks.environments.tools import Tool


def connect(command: str, loop: Loop, timeout_s: float) -> list[Tool]:
    """Start a server and ask for its tools. It stays connected as long as this process lives."""
    try:
        importlib.import_module("mcp")
    except ImportError as err:
        raise UserError("environment.mcp needs the MCP SDK: pip install 'paceline[mcp]'") from err
    words = shlex.split(command)
    if not words:
        raise UserError("environment.mcp names an empty command")
    try:
        return loop.run(_tools(_Server(words), timeout_s), timeout_s)
    except UserError:
        raise
    except Exception as err:  # the SDK raises groups of exceptions, and whatever the system says of a command
        raise UserError(f"the MCP server '{shorten(command)}' cannot be used: {_reason(err)}") from err


class _Server:
    """The connection lives in a task of its own, because the SDK's contexts must be left where they were entered."""

    def __init__(self, words: list[str]):
        self.words = words
        self.session: Any = None
        self._ready: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve())
        await self._ready

    async def _serve(self) -> None:
        sdk = importlib.import_module("mcp")
        stdio = importlib.import_module("mcp.client.stdio")
        assert self._ready is not None
        try:
            command = sdk.StdioServerParameters(command=self.words[0], args=self.words[1:], env=dict(os.environ))
            async with stdio.stdio_client(command) as (read, write), sdk.ClientSession(read, write) as session:
                await session.initialize()
                self.session = session
                self._ready.set_result(None)
                await asyncio.Event().wait()  # until this process ends
        except Exception as err:  # noqa: BLE001 (whoever waits is told)
            if not self._ready.done():
                self._ready.set_exception(err)
        self.session = None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self.session is None:
            raise BadStep("its MCP server has ended")
        result = await self.session.call_tool(name, dict(arguments))
        parts = [getattr(part, "text", None) or f"[{getattr(part, 'type', 'part')}]" for part in result.content]
        text = "\n".join(parts)
        if _field(result, "isError", "is_error"):
            raise BadStep(text or "the tool failed")
        return text


async def _tools(server: _Server, timeout_s: float) -> list[Tool]:
    await asyncio.wait_for(server.start(), timeout_s)
    listed = await asyncio.wait_for(server.session.list_tools(), timeout_s)
    return [_as_tool(server, tool) for tool in listed.tools]


def _as_tool(server: _Server, tool: Any) -> Tool:
    parameters = _field(tool, "inputSchema", "input_schema") or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    schema = {"type": "function", "function": function}
    return Tool(tool.name, schema, lambda arguments, _: server.call(tool.name, arguments))


def _field(value: Any, *names: str) -> Any:
    """Versions of the SDK spell it differently."""
    return next((getattr(value, name) for name in names if hasattr(value, name)), None)


def _reason(err: BaseException) -> str:
    while isinstance(err, BaseExceptionGroup) and err.exceptions:
        err = err.exceptions[0]
    return shorten(str(err), 200) or type(err).__name__
