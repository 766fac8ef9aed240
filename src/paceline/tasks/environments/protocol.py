"""What an environment is, and what its `step` may return.

    class Guess:
        def reset(self, sample): return "Guess the number from 1 to 9."
        def step(self, text): return "too low", 0.0, False      # observation, reward, done

`reset` may take the sample, its columns by name, or nothing, and returns the prompt, or None for that of the task.
`step` is given what the policy wrote. Both may be async. Forms of others are understood: Gymnasium's five values,
OpenEnv's object with `observation`, `reward` and `done`, and TRL's environments, whose methods are tools.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Protocol

from paceline.core import Prompt, Sample
from paceline.files.reading import shorten

Messages = list[dict[str, Any]]
MAX_ATTRIBUTE = 2**14  # characters of an attribute that reward functions are shown
MAX_SHOWN = 200  # characters of what was returned, in a sentence


class Environment(Protocol):
    def reset(self, sample: Sample) -> Prompt | None:
        """The prompt: a function of the sample, because all completions of a group share it."""
        ...

    def step(self, text: str) -> Any:
        """What the policy wrote -> observation, reward, done."""
        ...


class EndedEnvironment:
    """What TRL's reward functions are given as one of `environments`: the attributes that an environment had in the
    end. It ran in another process, so its methods are not there."""

    def __init__(self, attributes: dict[str, Any]):
        self.__dict__.update(attributes)


class BadStep(Exception):
    """An environment or a tool gave something that cannot be used."""


@dataclass(frozen=True)
class StepResult:
    """What a turn has led to."""

    observation: str | Messages
    """Text, or messages for the chat template."""
    reward: float | None = None
    done: bool = False
    calls: int = 0
    """Of tools."""
    errors: int = 0
    """Calls that failed, or 1 if the step did."""
    seconds: float = 0.0
    attributes: dict[str, Any] = field(default_factory=dict)
    """Of the environment when all was over, for reward functions."""

    @property
    def text(self) -> str:
        if isinstance(self.observation, str):
            return self.observation
        return "\n".join(str(message.get("content", "")) for message in self.observation)


def attributes_of(environment: Any) -> dict[str, Any]:
    """Those that can be written as JSON, if they are not larger than anybody reads."""
    out: dict[str, Any] = {}
    for name, value in getattr(environment, "__dict__", {}).items():
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            continue
        if not name.startswith("_") and len(text) <= MAX_ATTRIBUTE:
            out[name] = json.loads(text)
    return out


def read_step(value: Any) -> StepResult:
    """What `step` returned."""
    if isinstance(value, StepResult):
        return value
    if hasattr(value, "observation") and hasattr(value, "done"):
        return _made(value.observation, getattr(value, "reward", None), value.done)
    if isinstance(value, tuple | list) and len(value) in (3, 4):
        return _made(*value[:3])
    if isinstance(value, tuple | list) and len(value) == 5:  # Gymnasium: terminated, truncated
        return _made(value[0], value[1], value[2] or value[3])
    raise BadStep(f"step returned {shown(value)}, which is not (observation, reward, done)")


def _made(observation: Any, reward: Any, done: Any) -> StepResult:
    is_messages = isinstance(observation, list) and all(isinstance(m, dict) and "content" in m for m in observation)
    seen = observation if is_messages and observation else as_text(observation)
    if reward is None:
        return StepResult(seen, None, bool(done))
    try:
        number = float(reward)
    except (TypeError, ValueError) as err:
        raise BadStep(f"step returned the reward {shown(reward)}, which is not a number") from err
    if not math.isfinite(number):
        raise BadStep(f"step returned the reward {number}")
    return StepResult(seen, number, bool(done))


def as_text(value: Any) -> str:
    """A result as the model reads it."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as err:
            raise BadStep(f"the result is {len(value)} bytes that are no text") from err
    if hasattr(value, "model_dump"):  # pydantic's
        value = value.model_dump()
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as err:
        raise BadStep(f"the result {shown(value)} cannot be written as text") from err


def shown(value: Any) -> str:
    """A value in a sentence, whatever its `repr` does."""
    try:
        return shorten(repr(value), MAX_SHOWN)
    except Exception as err:  # noqa: BLE001 (the user's object; that it cannot be shown is what is reported)
        return f"a {type(value).__name__} that cannot be shown ({type(err).__name__})"


def call_reset(reset: Callable[..., Any], sample: Sample) -> Any:
    """With the sample, its columns by name, or nothing, as its signature asks for."""
    parameters = inspect.signature(reset).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "sample" in parameters:
        return reset(sample)
    columns = {"prompt": sample.prompt, **sample.columns}
    wanted = {name: value for name, value in columns.items() if takes_all or name in parameters}
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in wanted]
    missing = [
        name
        for name in missing
        if parameters[name].kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    if len(missing) == 1 and not takes_all and parameters[missing[0]].kind is not inspect.Parameter.KEYWORD_ONLY:
        return reset(sample, **wanted)  # it has a name of its own for the sample
    return reset(**wanted)


def read_prompt(value: Any, prompt: Prompt, takes_sample: bool) -> Prompt:
    """What `reset` returned, where the task has `prompt`. Text stands for it, or, where columns were asked for as TRL
    does, is added to the last message."""
    if hasattr(value, "observation"):
        value = value.observation
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):  # Gymnasium's: with an info
        value = value[0]
    if value is None:
        return prompt
    if isinstance(value, list) and value and all(isinstance(m, dict) and "content" in m for m in value):
        return value
    text = as_text(value)
    if isinstance(prompt, str):
        return text if takes_sample else prompt + text
    if takes_sample:
        return [*(m for m in prompt if m.get("role") == "system"), {"role": "user", "content": text}]
    return [*prompt[:-1], prompt[-1] | {"content": f"{prompt[-1]['content']}{text}"}]
