"""An MCP server from the official SDK as tools, in processes of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from paceline.errors import UserError
from paceline.tasks.environments.messages import ToolboxSpec

from .test_pool import SAMPLE, call, pool_of, results, told

COMMAND = f"{sys.executable} {Path(__file__).parent / 'mcp_server.py'}"
WORLD = Path(__file__).parent / "world.py"


def test_its_tools_are_offered_and_called():
    spec = ToolboxSpec(mcp=(COMMAND,), tools=(f"{WORLD}:add",))
    with pool_of(spec, workers=2) as pool:
        names = [schema["function"]["name"] for schema in pool.imported.schemas]
        assert names == ["add", "multiply", "divide", "wait"]
        (schema,) = (s["function"] for s in pool.imported.schemas if s["function"]["name"] == "multiply")
        assert schema["description"] == "Multiply two numbers."
        assert schema["parameters"]["properties"]["a"]["type"] == "integer"
        calls = [call("multiply", '{"a": 6, "b": 7}'), call("add", '{"a": 1}'), call("divide", '{"a": 1, "b": 0}')]
        product, added, failed = told(pool, *calls)
        assert product.result.text == "42" and added.result.text == "2"
        assert failed.result.errors == 1 and failed.result.text.startswith("error: ")
        many = told(pool, *[call("multiply", f'{{"a": {i}, "b": 2}}') for i in range(40)])
        assert [one.result.text for one in many] == [str(2 * i) for i in range(40)]


def test_one_that_takes_too_long_is_answered():
    with pool_of(ToolboxSpec(mcp=(COMMAND,)), timeout_s=1.5) as pool:
        (done,) = told(pool, call("wait", '{"seconds": 60}'))
        assert done.error == "took longer than 1.5 s"
        number = pool.submit(1, SAMPLE, call("multiply", '{"a": 2, "b": 2}'), False)
        assert results(pool, 1)[number].result.text == "4"


@pytest.mark.parametrize("command", ["no-such-program-anywhere", f"{sys.executable} -c pass", ""])
def test_one_that_is_none_is_said(command):
    with (
        pytest.raises(UserError, match=r"MCP|mcp names an empty"),
        pool_of(ToolboxSpec(mcp=(command,), start_timeout_s=20.0)),
    ):
        pass
