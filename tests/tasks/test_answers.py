"""Final answers as models and data sets write them, and how they are compared."""

from __future__ import annotations

import pytest

from paceline.core import Sample
from paceline.errors import UserError
from paceline.tasks.answers import final_answer, gold_answer, same_answer
from paceline.tasks.data_sources import reward_of
from paceline.tasks.datasets import DataSet
from paceline.tasks.reward_call import FinishedAnswer
from paceline.tasks.reward_errors import BadReward
from paceline.tasks.rewards import compute_rewards, load_reward

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = 72 altogether.\n#### 72"
MATH = r"We add: $1 + \frac{1}{2}$, which is $\boxed{\frac{3}{2}}$."


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer> 7 </answer>, or <answer>8</answer>, not 9. The answer is 3.", "8"),
        (GSM8K, "72"),
        ("The answer is 72.", "72"),
        ("The answer is 3. No: the final answer is $1,234.50. Done in 5 minutes.", "$1,234.50"),
        ("**Answer:** 1/2", "1/2"),
        ("Final Answer: \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("The answer is $\\boxed{72}$, of course", "72"),
        (r"first \boxed{1}, then \boxed{x_{2}}", "x_{2}"),
        (r"an open \boxed{1", None),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_final_answer_is_found(text, answer):
    assert final_answer(text) == answer


def test_the_right_answer_of_a_row_is_found():
    assert [gold_answer(text) for text in (GSM8K, MATH, "72", "the answer is no")] == [
        "72", r"\frac{3}{2}", "72", "the answer is no",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("72", "72.0", True),
        ("$1,234", "1234", True),
        ("\\$18", "18.", True),
        ("1,23", "123", False),
        ("72", "73", False),
        ("1e3", "1000", False),
        ("New  York.", "new york", True),
        ("New York City", "new york", False),
        ("-5", "5", False),
        ("9" * 5000, "9" * 5000, True),
        ("50%", "50", True),
    ],
)
def test_answers_are_compared_by_value(a, b, same):
    assert same_answer(a, b) == same_answer(b, a) == same


def score(reward, text, **columns):
    return compute_rewards(load_reward(reward), [FinishedAnswer(0, Sample(0, "?", columns), text, [])])[0]


@pytest.mark.parametrize("reward", ["exact_match", "math"])
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("She sold 72.\n#### 72", 1),
        ("The answer is 72.", 1),
        ("It is 48 + 24.\nThe answer is 72. I took 3 steps.", 1),
        ("#### 72\nDone in 3 steps.", 1),
        ("so <answer>72</answer>", 1),
        (r"so $\boxed{72}$", 1),
        ("72.00", 1),
        ("The answer is 24.", 0),
        ("#### 7", 0),
    ],
)
def test_gsm8k_as_models_answer_it(reward, text, value):
    assert score(reward, text, answer=GSM8K) == value


def test_solutions_with_a_box():
    assert score("math", "The answer is 1.5.", solution=MATH) == 1
    assert score("math", r"$\boxed{\frac{2}{3}}$", solution=MATH) == 0
    assert score("exact_match", r"so \boxed{\frac{3}{2}}", solution=MATH) == 1


@pytest.mark.parametrize(
    ("source", "text", "truth", "value"),
    [
        ("openai/gsm8k", "#### 72", "72", 1),
        ("openai/gsm8k", "#### 1 then #### 1,072", "1072", 1),
        ("openai/gsm8k", "The answer is 72.", "72", 0),  # verl's is strict, too
        ("lighteval/MATH", r"$\boxed{1.5}$", r"\frac{3}{2}", 1),
        ("HuggingFaceH4/MATH-500", r"$\boxed{2}$", r"\frac{3}{2}", 0),
        ("math_dapo", "Answer: 34", "34", 1),
        ("aime_2025", "Answer: 35", "34", -1),
        ("math_dapo", "Answer: 34" + " so" * 200, "34", -1),  # only the end is looked at
    ],
)
def test_rows_are_scored_by_their_source(source, text, truth, value):
    assert score("data_source", text, data_source=source, ground_truth=truth) == value


def test_an_unknown_source_is_named_before_the_run():
    rows = [{"prompt": "a", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "1"}}] * 2
    assert DataSet("d.jsonl", rows).reward == "data_source"
    assert DataSet("d.jsonl", [{"prompt": "a"}]).reward is None
    with pytest.raises(UserError, match=r"row 2 .* of d is of data_source 'apps', for which .* reward.functions"):
        _ = DataSet("d", [*rows, {"prompt": "b", "data_source": "apps"}]).reward
    with pytest.raises(UserError, match=r"row 0 is of data_source None"):
        reward_of([(None, "row 0")])
    with pytest.raises(BadReward, match="no ground_truth"):
        score("data_source", "x", data_source="openai/gsm8k")
