"""Reward functions: the built-in ones, and the user's own by `module:function` or `file.py:function`.

Three signatures are understood, and told apart by their parameters: TRL's `f(prompts, completions, **columns)`, which
returns a list with a number or None per completion; verl's `compute_score(data_source, solution_str, ground_truth,
extra_info)`, which returns a number or a dict with a `score`; and that of verl's batch manager, with the same names in
the plural, which returns a list of those.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.tasks import builtin, countdown, data_sources
from paceline.tasks.forecast import task as forecast
from paceline.tasks.grid import task as grid
from paceline.tasks.imports import import_named
from paceline.tasks.reward_call import PER, FinishedAnswer, Per, RewardLog
from paceline.tasks.reward_errors import BadReward

ENVIRONMENT = "environment"
"""The reward that an environment gives, by name."""
MAX_SHOWN = 200  # characters of what a function returned, in a sentence

Calls = Callable[[Sequence[FinishedAnswer], RewardLog], Sequence[Any]]
"""Completions -> a value for each, not checked yet."""


@dataclass(frozen=True)
class Reward:
    name: str
    weight: float
    call: Calls
    per: Per = "completion"
    """What it is given in one call."""


def load_reward(name: str, weight: float = 1.0, per: Per | None = None) -> Reward:
    """`per` as in `as_reward`."""
    known: dict[str, Callable[..., Any]] = {
        "countdown": countdown.reward,
        "exact_match": builtin.exact_match,
        "math": builtin.math_match,
        "gym": builtin.gym_score,
        "forecast": forecast.reward,
        "grid": grid.reward,
        ENVIRONMENT: builtin.environment_reward,
        data_sources.NAME: data_sources.score,
    }
    if name == "math":
        builtin.import_math_verify()  # missing, it is better found before any answer is written
    if name in known:
        return as_reward(known[name], name, weight, "completion")
    return as_reward(_import(name, sorted(known)), name, weight, per)


def as_reward(function: Callable[..., Any], name: str, weight: float = 1.0, per: Per | None = None) -> Reward:
    """A function with one of the signatures. Without `per` it is called as it asks for with the attribute `per`, or
    else as its signature means: with lists for a whole group, with a single answer for each completion."""
    call, is_for_lists = _adapt(function, name)
    asked = per or getattr(function, "per", None) or ("group" if is_for_lists else "completion")
    if asked not in PER:
        raise UserError(f"the reward '{name}' asks to be called per {asked!r}; there are: {', '.join(PER)}")
    return Reward(name, weight, call, asked)


def compute_rewards(
    reward: Reward, answers: Sequence[FinishedAnswer], log: RewardLog | None = None
) -> list[float | BadReward | None]:
    """Its value for each completion, None where it has no opinion, an error where that is not a number. Raises
    `BadReward` for what cannot be told apart by completion, and what the function raises."""
    values = reward.call(answers, log or RewardLog())
    if not hasattr(values, "__len__") or isinstance(values, str) or len(values) != len(answers):
        count = "one completion instead of a list with one value"
        if len(answers) > 1:
            count = (
                f"{len(answers)} completions instead of a list with as many values; to be called with one at a time "
            )
            count += "it asks for it: @paceline.per('completion')"
        raise BadReward(f"returned {shown(values)} for {count}")
    return [_checked(value) for value in values]


def _checked(value: Any) -> float | BadReward | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return BadReward(f"returned {shown(value)}, which is not a number")
    return number if math.isfinite(number) else BadReward(f"returned {number}")


def shown(value: Any) -> str:
    """A value in a sentence, however large it is and whatever its `repr` does."""
    try:
        return shorten(repr(value), MAX_SHOWN)
    except Exception as err:  # noqa: BLE001 (the user's object; that it cannot be shown is what is reported)
        return f"a {type(value).__name__} that cannot be shown ({type(err).__name__})"


def total(rewards: list[tuple[str, float]], values: dict[str, float]) -> float:
    return sum(weight * values[name] for name, weight in rewards if name in values)


def _import(name: str, known: list[str]) -> Callable[..., Any]:
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute:
        raise UserError(
            f"no reward is called '{name}': use {', '.join(known)}, or your own as module:function or file.py:function"
        )
    function: Callable[..., Any] = import_named(name, "the reward")
    return function


def _adapt(function: Callable[..., Any], name: str) -> tuple[Calls, bool]:
    """How it is called, and whether it takes lists."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    wanted = None if takes_all else frozenset(parameters)
    if "solution_str" in parameters:
        return partial(_call_verl, function, wanted), False
    if "solution_strs" in parameters:
        return partial(_call_verl_batch, function, wanted), True
    if "completions" in parameters:
        return partial(_call_trl, function, wanted), True
    raise UserError(
        f"the reward '{name}' takes ({', '.join(parameters)}); write it as f(prompts, completions, **columns) "
        "or compute_score(data_source, solution_str, ground_truth, extra_info)"
    )


def _call(function: Callable, wanted: frozenset[str] | None, arguments: Mapping[str, Any]) -> Any:
    """With the arguments that it wants, all if None; an async function is waited for."""
    result = function(**{k: v for k, v in arguments.items() if wanted is None or k in wanted})
    return _awaited(result) if inspect.iscoroutine(result) else result


def _verl_arguments(answer: FinishedAnswer) -> dict[str, Any]:
    columns = answer.sample.columns
    return {
        "data_source": columns.get("data_source"),
        "solution_str": answer.text,
        "ground_truth": columns.get("ground_truth"),
        "extra_info": columns.get("extra_info"),
    }


def _score_of(result: Any) -> Any:
    return result["score"] if isinstance(result, dict) else result


def _call_verl(
    function: Callable, wanted: frozenset[str] | None, answers: Sequence[FinishedAnswer], log: RewardLog
) -> Sequence[Any]:
    return [_score_of(_call(function, wanted, _verl_arguments(answer))) for answer in answers]


def _call_verl_batch(
    function: Callable, wanted: frozenset[str] | None, answers: Sequence[FinishedAnswer], log: RewardLog
) -> Sequence[Any]:
    rows = [_verl_arguments(answer) for answer in answers]
    plural = {"data_source": "data_sources", "solution_str": "solution_strs", "ground_truth": "ground_truths"}
    arguments = {plural.get(name, "extra_infos"): [row[name] for row in rows] for name in rows[0]}
    results = _call(function, wanted, arguments)
    return [_score_of(result) for result in results] if isinstance(results, list | tuple) else results


def _call_trl(
    function: Callable, wanted: frozenset[str] | None, answers: Sequence[FinishedAnswer], log: RewardLog
) -> Sequence[Any]:
    """Chat prompts come with chat completions, as in TRL."""
    names = dict.fromkeys(name for answer in answers for name in answer.sample.columns)  # which may be any
    arguments: dict[str, Any] = {name: [answer.sample.columns.get(name) for answer in answers] for name in names}
    arguments |= {
        "prompts": [answer.sample.prompt for answer in answers],
        "completions": [_as_messages(answer) for answer in answers],
        "completion_ids": [answer.tokens for answer in answers],
        "log_metric": log.metric,
        "log_extra": partial(log.extra, count=len(answers)),
    }
    return _call(function, wanted, arguments)


def _as_messages(answer: FinishedAnswer) -> Any:
    if isinstance(answer.sample.prompt, str):
        return answer.text
    if answer.messages is not None:
        return answer.messages
    return [{"role": "assistant", "content": answer.text}]


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of an async function; in a notebook, whose thread runs a loop already, from another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
