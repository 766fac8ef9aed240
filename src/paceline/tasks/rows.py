"""What a row of a data set must be: columns by name, one of which holds a prompt that a model can be given.

Types and emptiness only, so that all rows of a large data set can be checked before a run begins.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from paceline.core import Prompt
from paceline.errors import UserError
from paceline.files.reading import shorten

PROMPT_SETTING = "task.prompt_column"
WANTED = "it must be text, or messages with role and content"


def check_row(row: Any, prompt_column: str | None, where: str) -> None:
    """Refuse a row without a prompt that can be used; `where` says which row it is. None: it is made of other
    columns."""
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is {kind_of(row)}, not an object with columns")
    for name in row:
        if not isinstance(name, str):
            raise UserError(f"{where} has a column named {shorten(repr(name))}; names of columns must be text")
    if prompt_column is None:
        return
    if prompt_column not in row:
        refuse_column(prompt_column, PROMPT_SETTING, row, where)
    check_prompt(row[prompt_column], where)


def refuse_column(name: str, setting: str, columns: Iterable[str], where: str) -> NoReturn:
    """Say that there is no such column, which a setting asks for, and which there are."""
    has = shorten(", ".join(map(str, columns)), 200) or "none"
    if setting != PROMPT_SETTING:
        raise UserError(f"{where} has no '{shorten(name)}', which {setting} asks for; it has: {has}")
    raise UserError(
        f"{where} has no column '{name}' to take the prompt from; it has: {has}; "
        "name the right one with task.prompt_column, or make it of several with task.template"
    )


def check_prompt(prompt: Any, where: str) -> None:
    """Refuse what is neither text nor messages that a chat template can take."""
    if isinstance(prompt, str):
        if not prompt:
            raise UserError(f"{where} has an empty prompt")
        _check_text(prompt, where)
        return
    messages = as_list(prompt)
    if messages is None:
        raise UserError(f"the prompt in {where} is {kind_of(prompt)}; {WANTED}")
    if not messages:
        raise UserError(f"the prompt in {where} is an empty list; {WANTED}")
    for number, message in enumerate(messages, 1):
        problem = _problem(message, where)
        if problem:
            raise UserError(f"the prompt in {where} is neither text nor messages: message {number} {problem}")


def as_list(value: Any) -> list[Any] | None:
    """A list, a tuple or an array of the datasets library; None for what is none of them."""
    if isinstance(value, list):
        return value
    if isinstance(value, tuple):
        return list(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 0) == 1:
        return value.tolist()
    return None


def as_prompt(value: Any) -> Prompt:
    """A prompt that was checked."""
    return value if isinstance(value, str) else list(as_list(value) or [])


def check_sendable(columns: dict[str, Any], where: str) -> None:
    """Refuse what a process that runs rewards could not be sent."""
    try:
        pickle.dumps(columns)
    except Exception:  # objects of the user's, which may refuse in any way: the column is named below
        for name, value in columns.items():
            try:
                pickle.dumps(value)
            except Exception as err:
                raise UserError(
                    f"column '{shorten(name)}' of {where} is {kind_of(value)}, which cannot be sent to a reward "
                    f"process ({shorten(str(err), 120)}); use plain values, or give the reward as a Python function"
                ) from err
        raise


def kind_of(value: Any) -> str:
    """For a sentence."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, int | float):
        return "a number"
    names = {"str": "text", "list": "a list", "dict": "an object", "bytes": "bytes"}
    return names.get(type(value).__name__, f"of type {shorten(type(value).__name__)}")


def _problem(message: Any, where: str) -> str:
    if not isinstance(message, Mapping):
        return f"is {kind_of(message)}, not an object with role and content"
    if not isinstance(message.get("role"), str) or not message["role"]:
        return "has no role" if message.get("role") in (None, "") else "has a role that is not text"
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""  # an assistant that only calls tools says nothing
    if isinstance(content, str):
        _check_text(content, where)
        return ""
    parts = as_list(content)
    if parts is None:
        return "has no content" if content is None else f"has a content that is {kind_of(content)}, not text"
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return "has content of other parts than text, which Paceline's models do not take"
        _check_text(part["text"], where)
    return "" if parts else "has a content that is an empty list"


def _check_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise UserError(f"the prompt in {where} holds half of a character (a lone surrogate), not text") from err
