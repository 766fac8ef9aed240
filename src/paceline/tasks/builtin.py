"""The reward functions that compare an answer with the right one, in TRL's signature."""

from __future__ import annotations

from typing import Any

from paceline.errors import UserError
from paceline.tasks import gym
from paceline.tasks.answers import final_answer, gold_answer, same_answer
from paceline.tasks.reward_errors import BadReward
from paceline.tasks.sample import text_of

ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "target")


def expected(columns: dict[str, Any]) -> str:
    """The right answer, as the row has it."""
    for name in ANSWER_COLUMNS:
        if name in columns:
            return str(columns[name][0])
    raise BadReward(f"found no column with the right answer; it looks for {', '.join(ANSWER_COLUMNS)}")


def exact_match(completions: list[Any], **columns: Any) -> list[float]:
    """1 if the final answer (see `answers`), or else the last line, is the right one, up to spaces and case."""
    text = text_of(completions[0])
    answer = final_answer(text)
    lines = text.strip().splitlines()
    answer = answer if answer is not None else lines[-1] if lines else ""
    return [float(same_answer(answer, gold_answer(expected(columns))))]


def math_match(completions: list[Any], **columns: Any) -> list[float | None]:
    """1 if math-verify finds the right value in the text, 0 if not, no opinion if it cannot read the right answer."""
    return [math_score(text_of(completions[0]), expected(columns))]


def environment_reward(environment_reward: list[float | None], completions: list[Any], **_: Any) -> list[float | None]:
    """What the environment gave over all turns, no opinion if it gave nothing."""
    return environment_reward


def import_math_verify() -> Any:
    try:
        import math_verify
    except ImportError as err:
        raise UserError("the math reward needs math-verify: pip install 'paceline[math]'") from err
    return math_verify


def math_score(text: str, right: str) -> float | None:
    library = import_math_verify()
    parse = library.parse
    verify = library.verify
    right = gold_answer(right)
    gold = parse(right) or parse(f"${right}$")
    if not gold:
        return None
    if verify(gold, parse(text)):
        return 1.0
    marked = final_answer(text)  # math-verify does not know all the marks: it takes the last number of a text
    return float(marked is not None and (verify(gold, parse(marked)) or verify(gold, parse(f"${marked}$"))))


def gym_score(completions: list[Any], entry: list[Any], task: list[str], **_: Any) -> list[float]:
    return [gym.score(text_of(completions[0]), entry[0], task[0])]
