"""Python functions as tools: what the model is told of them, how they are called, and what it is told they returned."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from paceline.core import Sample
from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.tasks.environments.protocol import BadStep

SAMPLE = "sample"
MAX_PROBLEM = 300  # characters of what is wrong with arguments
ARGS = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$", re.MULTILINE)
ENTRY = re.compile(r"^(\s+)(\*{0,2}\w+)\s*(?:\(.*?\))?\s*:\s*(.*)$")


@dataclass(frozen=True)
class Tool:
    name: str
    schema: dict[str, Any]
    """As chat templates take it: {"type": "function", "function": {name, description, parameters}}."""
    call: Callable[[Mapping[str, Any], Sample], Any]
    """With arguments by name, for a completion to this sample; what it returns may have to be awaited. Raises `BadStep`
    for arguments that do not fit."""


def as_tool(function: Callable[..., Any], name: str | None = None) -> Tool:
    """A function with typed parameters and a docstring, whose `Args:` describe them. A parameter called `sample` is not
    the model's: it is given the sample, with the columns of its row."""
    own = name or str(getattr(function, "__name__", type(function).__name__))
    try:
        parameters = inspect.signature(function).parameters.values()
        hints = get_type_hints(function)
    except (TypeError, ValueError, NameError) as err:
        raise UserError(f"the tool '{own}' has no signature that can be read: {shorten(str(err))}") from err
    about, described = read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise UserError(f"the tool '{own}' takes {one}; a model calls tools with arguments by name")
        if one.name == SAMPLE:
            continue
        default = ... if one.default is one.empty else one.default
        fields[one.name] = (hints.get(one.name, Any), default)
    try:
        model = create_model(own, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
        adapter = TypeAdapter(model)
        schema = _without_titles(model.model_json_schema())
    except Exception as err:  # pydantic has many words for a type that JSON has not
        raise UserError(
            f"the tool '{own}' has a parameter that cannot be written as JSON: {shorten(str(err))}"
        ) from err
    for parameter, text in described.items():
        if parameter in schema.get("properties", {}):
            schema["properties"][parameter]["description"] = text

    own_sample = any(one.name == SAMPLE for one in parameters)

    def call(arguments: Mapping[str, Any], sample: Sample) -> Any:
        try:
            checked = adapter.validate_python(dict(arguments))
        except ValidationError as err:
            raise BadStep(_problem(err)) from err
        given = {key: getattr(checked, key) for key in fields if key in checked.model_fields_set}
        return function(**given, **({SAMPLE: sample} if own_sample else {}))

    return Tool(own, {"type": "function", "function": {"name": own, "description": about, "parameters": schema}}, call)


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What stands before `Args:`, and what it says of each parameter."""
    match = ARGS.search(text)
    if match is None:
        return text.strip(), {}
    described: dict[str, str] = {}
    depth: int | None = None
    last = ""
    for line in text[match.end() :].splitlines():
        if line.strip() and not line.startswith((" ", "\t")):
            break  # the next section
        entry = ENTRY.match(line)
        if entry and (depth is None or len(entry[1]) <= depth):
            depth = len(entry[1])
            last = entry[2].lstrip("*")
            described[last] = entry[3].strip()
        elif last and line.strip():
            described[last] = f"{described[last]} {line.strip()}".strip()
    return text[: match.start()].strip(), described


def describe_tools(schemas: list[dict[str, Any]]) -> str:
    """In words, for models whose template does not know tools."""
    lines = []
    for schema in schemas:
        function = schema["function"]
        properties = function["parameters"].get("properties", {})
        arguments = ", ".join(f"{name}: {one.get('type', 'any')}" for name, one in properties.items())
        about = " ".join(function["description"].split())
        lines.append(f"- {function['name']}({arguments}): {about}")
    how = '<tool>{"name": NAME, "arguments": {ARGUMENT: VALUE}}</tool>'
    return "You can call tools by writing " + how + " and ending there:\n" + "\n".join(lines) + "\n\n"


def _problem(err: ValidationError) -> str:
    parts = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in err.errors())
    return shorten("the arguments do not fit: " + "; ".join(parts), MAX_PROBLEM)


def _without_titles(schema: Any) -> Any:
    """pydantic gives everything a title, which says nothing; a property may be called that."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: _without_titles(v) for k, v in schema.items() if k not in ("title", "properties", "additionalProperties")}
    if "properties" in schema:
        out["properties"] = {k: _without_titles(v) for k, v in schema["properties"].items()}
    return out
