"""Reward functions: the built-in ones, and the user's own by `module:function` or `file.py:function`.

Two signatures are understood, and told apart by their parameters: TRL's `f(prompts, completions, **columns)`, which
returns a list with a number or None per completion, and verl's `compute_score(data_source, solution_str, ground_truth,
extra_info)`, which returns a number or a dict with a `score`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core import Sample
from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.tasks import builtin, countdown, data_sources
from paceline.tasks.forecast import task as forecast
from paceline.tasks.reward_errors import BadReward

MAX_SHOWN = 200  # characters of what a function returned, in a sentence


@dataclass(frozen=True)
class Reward:
    name: str
    weight: float
    call: Callable[[Sample, str, list[int]], float | None]
    """(sample, text of the completion, its tokens) -> value, or None for no opinion."""


def load_reward(name: str, weight: float = 1.0) -> Reward:
    known: dict[str, Callable[..., Any]] = {
        "countdown": countdown.reward,
        "exact_match": builtin.exact_match,
        "math": builtin.math_match,
        "gym": builtin.gym_score,
        "forecast": forecast.reward,
        data_sources.NAME: data_sources.score,
    }
    if name == "math":
        builtin.import_math_verify()  # missing, it is better found before any answer is written
    return as_reward(known.get(name) or _import(name, sorted(known)), name, weight)


def as_reward(function: Callable[..., Any], name: str, weight: float = 1.0) -> Reward:
    """A function with one of the two signatures."""
    return Reward(name, weight, _adapt(function, name))


def compute_rewards(rewards: list[Reward], sample: Sample, text: str, tokens: list[int]) -> dict[str, float]:
    """Value of each function that has an opinion. Raises `BadReward` for what is not a number."""
    values = {}
    for reward in rewards:
        value = reward.call(sample, text, tokens)
        if value is None:
            continue
        if isinstance(value, bool):
            value = float(value)
        try:
            number = float(value)
        except (TypeError, ValueError) as err:
            raise BadReward(f"returned {shown(value)}, which is not a number") from err
        if not math.isfinite(number):
            raise BadReward(f"returned {number}")
        values[reward.name] = number
    return values


def shown(value: Any) -> str:
    """A value in a sentence, however large it is and whatever its `repr` does."""
    try:
        return shorten(repr(value), MAX_SHOWN)
    except Exception as err:  # noqa: BLE001 (the user's object; that it cannot be shown is what is reported)
        return f"a {type(value).__name__} that cannot be shown ({type(err).__name__})"


def total(rewards: list[tuple[str, float]], values: dict[str, float]) -> float:
    return sum(weight * values[name] for name, weight in rewards if name in values)


def _import(name: str, known: list[str]) -> Callable[..., Any]:
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise UserError(
            f"no reward is called '{name}': use {', '.join(known)}, or your own as module:function or file.py:function"
        )
    try:
        is_file = module_name.endswith(".py")
        module = _import_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except UserError:
        raise
    except (Exception, SystemExit) as err:  # a module can fail in any way while it is imported
        reason = shorten(f"{type(err).__name__}: {err}", MAX_SHOWN)
        raise UserError(f"the reward '{name}' cannot be imported: {reason}") from err
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"{module_name} has no function '{attribute}', which the reward '{name}' names")
    return function


def _import_file(path: Path) -> Any:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"no file at {path}, where a reward function should be")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # so that it can import its neighbours
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _adapt(function: Callable[..., Any], name: str) -> Callable[[Sample, str, list[int]], float | None]:
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "solution_str" in parameters:
        return lambda sample, text, tokens: _call_verl(function, parameters, takes_all, sample, text)
    if "completions" in parameters:
        return lambda sample, text, tokens: _call_trl(function, name, parameters, takes_all, sample, text, tokens)
    raise UserError(
        f"the reward '{name}' takes ({', '.join(parameters)}); write it as f(prompts, completions, **columns) "
        "or compute_score(data_source, solution_str, ground_truth, extra_info)"
    )


def _call_verl(function: Callable, parameters: Any, takes_all: bool, sample: Sample, text: str) -> Any:
    arguments = {
        "data_source": sample.columns.get("data_source"),
        "solution_str": text,
        "ground_truth": sample.columns.get("ground_truth"),
        "extra_info": sample.columns.get("extra_info"),
    }
    result = function(**{k: v for k, v in arguments.items() if takes_all or k in parameters})
    return result["score"] if isinstance(result, dict) else result


def _call_trl(
    function: Callable,
    name: str,
    parameters: Any,
    takes_all: bool,
    sample: Sample,
    text: str,
    tokens: list[int],
) -> Any:
    """One completion as a batch of one. Chat prompts come with chat completions, as in TRL."""
    completion: Any = text if isinstance(sample.prompt, str) else [{"role": "assistant", "content": text}]
    arguments = {column: [value] for column, value in sample.columns.items()}  # which may have any names
    arguments |= {"prompts": [sample.prompt], "completions": [completion], "completion_ids": [tokens]}
    result = function(**{k: v for k, v in arguments.items() if takes_all or k in parameters})
    if inspect.iscoroutine(result):
        result = _awaited(result)
    if not hasattr(result, "__len__") or len(result) != 1:
        raise BadReward(f"returned {shown(result)} for one completion instead of a list with one value")
    return result[0]


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of an async function; in a notebook, whose thread runs a loop already, from another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
