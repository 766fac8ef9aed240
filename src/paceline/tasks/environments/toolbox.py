"""An episode: an environment, tools, or both, for one completion."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core import Prompt, Sample
from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.tasks.environments.calls import Family, ToolCall, find_calls
from paceline.tasks.environments.protocol import (
    BadStep,
    StepResult,
    as_text,
    attributes_of,
    call_reset,
    read_prompt,
    read_step,
)
from paceline.tasks.environments.tools import Tool, as_tool

NO_TOOLS = ("reset", "step", "get_reward", "close")
MAX_RAISED = 300  # characters of what a tool raised


class Loop:
    """One event loop for all that is async, in a thread of its own: what belongs to it stays usable."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="paceline-async").start()

    def wait(self, value: Any) -> Any:
        """The result, if it has to be awaited. The pool's time limit is the deadline: it ends the process."""
        if not inspect.isawaitable(value):
            return value

        async def awaited() -> Any:
            return await value

        return self.run(awaited())

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)


@dataclass(frozen=True)
class Toolbox:
    """What episodes are made from."""

    make: Callable[[], Any] | None
    """An environment for an episode; None if there are only tools."""
    tools: Mapping[str, Tool]
    """Of all episodes."""
    family: Family
    max_chars: int
    loop: Loop = field(default_factory=Loop)

    def __post_init__(self) -> None:
        if self.make is None:
            return
        probe = self._made()
        if not callable(getattr(probe, "step", None)) and not self.methods(probe):
            raise UserError(f"the environment {type(probe).__name__} has neither a step nor other methods, as tools")
        self.close(probe)

    def _made(self) -> Any:
        assert self.make is not None
        return self.make()

    @property
    def keeps_state(self) -> bool:
        return self.make is not None

    def methods(self, environment: Any) -> dict[str, Tool]:
        """Of an environment without `step`, whose methods are tools."""
        if environment is None or callable(getattr(environment, "step", None)):
            return {}
        names = [name for name in dir(type(environment)) if not name.startswith("_") and name not in NO_TOOLS]
        functions = {name: getattr(environment, name) for name in names}
        return {name: as_tool(function, name) for name, function in functions.items() if inspect.ismethod(function)}

    def schemas(self) -> list[dict[str, Any]]:
        """What the model is told of the tools."""
        own = self.methods(self._made()) if self.make else {}
        return [tool.schema for tool in (*self.tools.values(), *own.values())]

    def prompt(self, sample: Sample) -> Prompt:
        """Of all completions of a sample."""
        if self.make is None:
            return sample.prompt
        environment = self._made()
        prompt = self.reset(environment, sample)
        self.close(environment)
        return prompt

    def reset(self, environment: Any, sample: Sample) -> Prompt:
        if not callable(getattr(environment, "reset", None)):
            return sample.prompt
        value = self.loop.wait(call_reset(environment.reset, sample))
        return read_prompt(value, sample.prompt, takes_sample=callable(getattr(environment, "step", None)))

    def close(self, environment: Any) -> None:
        if callable(getattr(environment, "close", None)):
            self.loop.wait(environment.close())

    def cut(self, result: StepResult) -> StepResult:
        """No more than a model is to read."""
        if isinstance(result.observation, str):
            return replace(result, observation=self._cut(result.observation))
        messages = [m | {"content": self._cut(m["content"])} for m in result.observation]
        return replace(result, observation=messages)

    def _cut(self, text: Any) -> Any:
        if not isinstance(text, str) or len(text) <= self.max_chars:
            return text
        return f"{text[: self.max_chars]}... (cut: {len(text):,} characters)"


class Episode:
    """One completion's."""

    def __init__(self, box: Toolbox, sample: Sample):
        self.box = box
        self.steps = 0
        self._sample = sample
        self._environment = box.make() if box.make else None
        self._tools = {**box.tools, **box.methods(self._environment)}
        if self._environment is not None:
            box.reset(self._environment, sample)

    def step(self, text: str, raw: str, last: bool) -> StepResult:
        """What a turn leads to. `raw` is its text with special tokens; with `last`, no other turn follows."""
        self.steps += 1
        calls = find_calls(raw, self.box.family) if self._tools else []
        if calls and not last:
            return self.box.cut(self._call(calls))
        result = StepResult("", None, done=True)
        step = getattr(self._environment, "step", None)
        if callable(step):
            result = read_step(self.box.loop.wait(step(text)))
        if result.done or last:
            result = replace(self._rewarded(result), attributes=attributes_of(self._environment))
            self.box.close(self._environment)
        return self.box.cut(result)

    def _rewarded(self, result: StepResult) -> StepResult:
        """TRL's environments tell their reward when all is over."""
        ask = getattr(self._environment, "get_reward", None)
        if not callable(ask):
            return result
        value = self.box.loop.wait(ask())
        reward = read_step(("", value, True)).reward
        return replace(result, reward=reward if result.reward is None else result.reward + (reward or 0.0))

    def _call(self, calls: list[ToolCall]) -> StepResult:
        messages = []
        errors = 0
        for call in calls:
            text, failed = self._result(call)
            errors += failed
            messages.append({"role": "tool", "name": call.name, "content": text})
        return StepResult(messages, None, False, len(calls), errors)

    def _result(self, call: ToolCall) -> tuple[str, bool]:
        """As text, and whether it is an error's."""
        if call.problem:
            return f"error: {call.problem}", True
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool '{shorten(call.name, 60)}'; there are: {', '.join(self._tools)}", True
        try:
            return as_text(self.box.loop.wait(tool.call(call.arguments, self._sample))), False
        except BadStep as err:
            return f"error: {err}", True
        except (Exception, SystemExit) as err:  # noqa: BLE001 (the user's code: the model is told)
            return f"error: {type(err).__name__}: {shorten(str(err), MAX_RAISED)}", True
