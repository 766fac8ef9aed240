"""Tools: what the model is told of them, how its calls are read, and what it is shown of their results."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path

import pytest

from paceline.core import Sample
from paceline.errors import UserError
from paceline.model.tokenizer import load_tokenizer
from paceline.tasks.environments.calls import ToolCall, family_of, find_calls
from paceline.tasks.environments.chat import Chat
from paceline.tasks.environments.protocol import BadStep
from paceline.tasks.environments.tools import as_tool, describe_tools, read_docstring

from ..tied import make_tied
from . import world

CALL = {"name": "add", "arguments": {"a": 1}}


def test_a_schema_from_signature_and_docstring():
    function = as_tool(world.add).schema["function"]
    assert function["name"] == "add" and function["description"] == "Add two numbers."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first number."},
            "b": {"type": "integer", "default": 1, "description": "The second one, which is 1 if it is left out."},
        },
        "required": ["a"],
    }
    assert describe_tools([{"function": function}]).endswith("- add(a: integer, b: integer): Add two numbers.\n\n")


def test_the_same_schema_as_transformers():
    """What chat templates were trained with."""
    from transformers.utils import get_json_schema

    theirs = get_json_schema(world.add)["function"]
    ours = as_tool(world.add).schema["function"]
    assert ours["name"] == theirs["name"] and ours["description"] == theirs["description"]
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    for name, one in theirs["parameters"]["properties"].items():
        assert one.items() <= ours["parameters"]["properties"][name].items()


def test_nested_types_and_what_cannot_be_a_tool():
    def find(names: list[str], limits: dict[str, float] | None = None, kind: str = "title") -> str:
        """Find."""
        return f"{names} {limits} {kind}"

    tool = as_tool(find)
    properties = tool.schema["function"]["parameters"]["properties"]
    assert properties["names"] == {"type": "array", "items": {"type": "string"}} and "kind" in properties
    assert tool.call({"names": ["a"], "limits": {"x": 1}}, Sample(0, "?")) == "['a'] {'x': 1.0} title"
    for wrong in (lambda *a: 1, lambda **k: 1):
        with pytest.raises(UserError, match="by name"):
            as_tool(wrong, "f")
    with pytest.raises(UserError, match="cannot be written as JSON"):
        as_tool(_takes_a_function, "f")


def test_a_tool_that_knows_the_row():
    """What is not the model's to say, and not in the schema."""

    def look_up(word: str, sample: Sample) -> str:
        """Look up."""
        return sample.columns["words"].get(word, "nothing")

    tool = as_tool(look_up)
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["word"]
    assert tool.call({"word": "a"}, Sample(0, "?", {"words": {"a": "first"}})) == "first"
    with pytest.raises(BadStep, match="sample"):
        tool.call({"word": "a", "sample": 3}, Sample(0, "?"))


def _takes_a_function(a: threading.Thread) -> None:
    """Nothing."""


def test_docstrings():
    text = "Do.\n\nIn two parts.\n\nArgs:\n    a (int): One.\n    b: Two:\n        and more.\n\nReturns:\n    c: no."
    assert read_docstring(text) == ("Do.\n\nIn two parts.", {"a": "One.", "b": "Two: and more."})
    assert read_docstring("") == ("", {})


@pytest.mark.parametrize(
    ("family", "text", "found"),
    [
        ("hermes", f"<think>x</think>\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>", [("add", {"a": 1})]),
        (
            "hermes",
            f"<tool_call>{json.dumps(CALL)}</tool_call> and <tool_call>{json.dumps(CALL)}",
            [("add", {"a": 1})] * 2,
        ),
        ("hermes", f"<think><tool_call>{json.dumps(CALL)}</tool_call></think> no", []),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>', [("add", {"a": 2})]),
        ("hermes", "nothing", []),
        (
            "hermes",
            "<tool_call>\n<function=up>\n<parameter=text>\nA b\n</parameter>\n"
            "<parameter=n>3</parameter></function>\n</tool_call>",
            [("up", {"text": "A b", "n": 3})],
        ),
        (
            "llama",
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "up"}',
            [("add", {"a": 1}), ("up", {})],
        ),
        ("llama", ' {"name": "add", "parameters": {"a": 1}} ', [("add", {"a": 1})]),
        ("llama", 'It is {"name": 1}', []),
        ("mistral", f"[TOOL_CALLS][{json.dumps(CALL)}]", [("add", {"a": 1})]),
        ("plain", f"Let me see <tool>{json.dumps(CALL)}</tool>", [("add", {"a": 1})]),
    ],
)
def test_calls_by_family(family, text, found):
    assert [(call.name, call.arguments) for call in find_calls(text, family)] == found


@pytest.mark.parametrize("body", ["{", "[1]", '{"name": 3}', '{"name": "f", "arguments": 3}', "[" * 100_000, ""])
@pytest.mark.parametrize("family", ["hermes", "llama", "mistral", "plain"])
def test_calls_that_cannot_be_read_say_why(family, body):
    marks = {"hermes": "<tool_call>{}</tool_call>", "llama": "<|python_tag|>{}", "mistral": "[TOOL_CALLS]{}"}
    found = find_calls(marks.get(family, "<tool>{}</tool>").replace("{}", body), family)
    assert all(isinstance(call, ToolCall) and call.problem for call in found)
    assert found or (body == "" and family in ("llama", "mistral"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(make_tied(tmp_path_factory.mktemp("tied") / "model")))


def test_an_observation_behind_a_turn(tokenizer):
    """With the template of a small model: the turn's own end is not written twice, and the policy goes on after it."""
    chat = Chat(tokenizer, (), describe=True)
    seen = "it is 3"
    stopped = [*tokenizer.encode_text("so"), 1]
    action = chat.action(stopped)
    assert (action.text, action.end) == ("so", "<|im_end|>")
    tokens = chat.observation(action.end, seen, is_chat=True)
    assert tokenizer.decode(tokens, skip_special=False) == "<|user|>it is 3<|im_end|><|assistant|>"
    by_other = chat.action([*tokenizer.encode_text("so"), 2])  # another stop token: the template's own end follows
    tokens = chat.observation(by_other.end, seen, is_chat=True)
    assert tokenizer.decode(tokens, skip_special=False) == "<|im_end|><|user|>it is 3<|im_end|><|assistant|>"
    assert tokenizer.decode(chat.observation("", seen, is_chat=False)) == seen
    tool = [{"role": "tool", "name": "add", "content": "3"}]
    assert tokenizer.decode(chat.observation("", tool, is_chat=False)) == "\n<result>3</result>\n"


def test_tools_are_told_of_where_the_template_does_not(tokenizer):
    chat = Chat(tokenizer, (as_tool(world.add).schema,), describe=True)
    assert chat.family == "plain" and "tools" not in tokenizer.template_kwargs
    told = chat.offered([{"role": "user", "content": "Hello"}])
    assert told[0]["role"] == "system" and "add(a: integer" in told[0]["content"] and told[1]["content"] == "Hello"
    merged = chat.offered([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}])
    assert len(merged) == 2 and merged[0]["content"].endswith("Be kind.") and "<tool>" in merged[0]["content"]
    assert chat.offered("Hello").endswith("Hello") and "<tool>" in chat.offered("Hello")


def templates() -> list[Path]:
    """Those of real models, as TRL ships them."""
    found = importlib.util.find_spec("trl")
    folder = Path(found.origin).parent / "chat_templates" if found and found.origin else Path()
    names = ("qwen2_5.jinja", "qwen3.jinja", "qwen3_instruct_2507.jinja", "qwen3_6.jinja", "llama3_1.jinja",
             "llama3_2.jinja", "llama3.jinja")  # fmt: skip
    return [folder / name for name in names if (folder / name).exists()]


@pytest.mark.parametrize("template", templates(), ids=lambda path: path.stem)
def test_templates_of_real_models(tokenizer, template):
    tokenizer.hf.chat_template, before = template.read_text(), tokenizer.hf.chat_template
    kept = tokenizer.template_kwargs
    tokenizer.hf.bos_token = "<unk>"
    try:
        chat = Chat(tokenizer, (as_tool(world.add).schema,), describe=True)
        assert chat.family == ("hermes" if "qwen" in template.stem else "llama" if "3_" in template.stem else "plain")
        shown = tokenizer.render(chat.offered([{"role": "user", "content": "What is 1 + 1?"}]))
        assert ("Add two numbers" in shown and "The first number" in shown) or chat.family == "plain"
        behind = chat._behind([{"role": "tool", "name": "add", "content": "42"}])
        assert "42" in behind and not behind.startswith("42")
        end = "<|im_end|>" if "qwen" in template.stem else "<|eot_id|>"
        assert behind.startswith(end) and behind.rstrip().endswith(("assistant", "<think>", "<|end_header_id|>"))
    finally:
        tokenizer.hf.chat_template = before
        tokenizer.template_kwargs = kept
        tokenizer.hf.bos_token = None


def test_families():
    assert family_of(None) == family_of("{{ messages }}") == "plain"
