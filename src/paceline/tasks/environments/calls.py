"""Tool calls in what a model writes, by the family that it belongs to.

    hermes   <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>     Hermes, Qwen2.5, Qwen3 and others; or
             <tool_call><function=f><parameter=x>1</parameter></function></tool_call>       Qwen3-Coder, Qwen3.5
    llama    {"name": "f", "parameters": {"x": 1}}, behind <|python_tag|> or as all that is written
    mistral  [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]
    plain    <tool>{"name": "f", "arguments": {"x": 1}}</tool>               where the template knows no tools

What is written before the end of a </think> is not looked at.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.files.reading import shorten

Family = Literal["hermes", "llama", "mistral", "plain"]
BLOCKS = {
    "hermes": re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL),
    "plain": re.compile(r"<tool>(.*?)(?:</tool>|\Z)", re.DOTALL),
}
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"
MISTRAL_TAG = "[TOOL_CALLS]"
MAX_CALLS = 64  # in one turn


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why it is none."""


def family_of(template: str | None) -> Family:
    """By what the chat template says."""
    template = template or ""
    if "<tool_call>" in template:
        return "hermes"
    if MISTRAL_TAG in template:
        return "mistral"
    if "python_tag" in template or ("ipython" in template and "tools" in template):
        return "llama"
    return "plain"


def find_calls(text: str, family: Family) -> list[ToolCall]:
    """In order; those that cannot be read say why."""
    text = text.rpartition("</think>")[2]
    if family in BLOCKS:
        return [_read(block) for block in BLOCKS[family].findall(text)[:MAX_CALLS]]
    if family == "mistral":
        _, tag, after = text.partition(MISTRAL_TAG)
        return _read_several(after) if tag else []
    _, tag, after = text.partition(PYTHON_TAG)
    if tag:
        return _read_several(after)
    stripped = text.strip()
    return _read_several(stripped) if stripped.startswith("{") and '"name"' in stripped else []


def _read_several(text: str) -> list[ToolCall]:
    """Objects one after the other, with semicolons between them or in a list."""
    decoder = json.JSONDecoder()
    found: list[ToolCall] = []
    text = text.strip()
    while text and len(found) < MAX_CALLS:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as err:
            return [*found, ToolCall("", problem=_not_json(err))]
        found += map(_checked, value if isinstance(value, list) else [value])
        text = text[end:].lstrip("; \n\t")
        if not text.startswith(("{", "[")):  # what the model says besides
            break
    return found


def _read(block: str) -> ToolCall:
    if function := FUNCTION.fullmatch(block):
        return ToolCall(function[1].strip(), {name.strip(): _value(v) for name, v in PARAMETER.findall(function[2])})
    try:
        return _checked(json.loads(block))
    except (ValueError, RecursionError) as err:
        return ToolCall("", problem=_not_json(err))


def _value(text: str) -> Any:
    """JSON where it is that; text has no quotes there."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _checked(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", problem='a call is {"name": NAME, "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some write them as JSON within JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolCall(value["name"], problem="the arguments are no JSON object")
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], problem="the arguments are no JSON object")
    return ToolCall(value["name"], arguments)


def _not_json(err: Exception) -> str:
    return f"the call is not JSON: {shorten(str(err), 100)}"
