"""verl's scoring by `data_source`: rows that say which data set they are from are scored as verl scores that one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from paceline.errors import UserError
from paceline.files.reading import shorten
from paceline.tasks.builtin import math_score
from paceline.tasks.reward_errors import BadReward

NAME = "data_source"
"""Of the reward, and of the column."""
GSM8K = ("openai/gsm8k",)
MATH = (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "numina_aops_forum",
    "numina_synthetic_math",
    "numina_amc_aime",
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
)
DAPO = ("math_dapo", "math", "math_dapo_reasoning")
DAPO_PREFIX = "aime"
DAPO_TAIL = 300  # characters in which the answer must stand, as in verl
STRICT = re.compile(r"#### (-?[0-9.,]+)")


def is_known(source: Any) -> bool:
    if not isinstance(source, str):
        return False
    return source in (*GSM8K, *MATH, *DAPO) or source.startswith(DAPO_PREFIX)


def reward_of(rows: Iterable[tuple[Any, str]]) -> str:
    """The reward for rows, given as (data_source, which row it is), all of which must be of known sources."""
    for source, where in rows:
        if not is_known(source):
            raise UserError(f"{where} {_unknown(source)}; name a reward in reward.functions")
    return NAME


def score(data_source: Any, solution_str: str, ground_truth: Any) -> float | None:
    """GSM8K: 1 for `#### ANSWER`, to the character. MATH: 1 by math-verify. DAPO and AIME: 1 or -1, likewise, from the
    last 300 characters."""
    if not is_known(data_source):
        raise BadReward(f"does not score this row, which {_unknown(data_source)}")
    if ground_truth is None:
        raise BadReward("found no ground_truth (reward_model.ground_truth) to compare with")
    if data_source in GSM8K:
        answers = STRICT.findall(solution_str)
        return float(bool(answers) and answers[-1].replace(",", "") == str(ground_truth).replace(",", ""))
    if data_source in MATH:
        return math_score(solution_str, str(ground_truth))
    value = math_score(solution_str[-DAPO_TAIL:], str(ground_truth))
    return None if value is None else 2 * value - 1


def _unknown(source: Any) -> str:
    known = ", ".join((*GSM8K, *MATH[:3], *DAPO))
    return (
        f"is of data_source {shorten(repr(source))}, for which there is no built-in scoring "
        f"(there is for {known}, numina_… and {DAPO_PREFIX}…)"
    )
