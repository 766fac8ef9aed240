"""An MCP server from the official SDK, over stdin and stdout."""

from __future__ import annotations

import time

try:
    from mcp.server import MCPServer as Server
except ImportError:  # before version 2
    from mcp.server.fastmcp import FastMCP as Server

server = Server("numbers")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@server.tool()
def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


if __name__ == "__main__":
    server.run("stdio")
