"""Problems can be solved, the verifier is exact, and search traces say what they do."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UserError
from paceline.tasks.countdown import LEVELS, TAIL, Countdown, make_problem, reward, solves

from ..conftest import benchmark

search_traces = benchmark("search_traces")


def reachable(numbers: tuple[int, ...]) -> set[Fraction]:
    """Every value that the numbers can make, by brute force."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    out = set()
    for i, j in itertools.combinations(range(len(numbers)), 2):
        rest = tuple(x for k, x in enumerate(numbers) if k not in (i, j))
        a, b = Fraction(numbers[i]), Fraction(numbers[j])
        for value in {a + b, a - b, b - a, a * b, *([a / b] if b else []), *([b / a] if a else [])}:
            out |= reachable((*rest, value))
    return out


@pytest.mark.parametrize("level", ["easy", "medium", "hard"])
def test_every_problem_has_a_solution(level):
    r = random.Random(0)
    for _ in range(20):
        problem = make_problem(LEVELS[level], r)
        assert len(problem.numbers) in LEVELS[level].counts
        assert LEVELS[level].targets[0] <= problem.target <= LEVELS[level].targets[1]
        assert problem.target in reachable(problem.numbers)


def test_the_stream_is_a_function_of_seed_and_place():
    one, two, other = Countdown(seed=3), Countdown(seed=3), Countdown(seed=4)
    assert [one.sample(i) for i in (7, 1, 7)] == [two.sample(i) for i in (7, 1, 7)]
    assert one.sample(7).columns != other.sample(7).columns


def test_a_finite_number_of_problems_comes_round_in_another_order():
    task = Countdown(problems=10)
    first, second = ([task.sample(i).prompt for i in range(a, a + 10)] for a in (0, 10))
    assert sorted(first) == sorted(second) and first != second


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<answer>(3+4)*5</answer>", True),
        ("<answer> ( 3 + 4 ) × 5 = 35 </answer>", True),
        ("<think><answer>3</answer></think><answer>5*(4+3)</answer>", True),
        ("<answer>[3+4]*5</answer>", True),
        ("<answer>3+4*5</answer>", False),
        ("<answer>35</answer>", False),
        ("<answer>(3+4)*5*1</answer>", False),
        ("<answer>(3+4)*5+3-3</answer>", False),
        ("<answer>7*5</answer>", False),
        ("<answer>34+5-4</answer>", False),
        ("<answer>(3+4)*5</answer><answer>?</answer>", False),
        ("(3+4)*5", False),
        ("<answer>3**4</answer>", False),
        ("<answer>__import__('os')</answer>", False),
        ("<answer>(3+4)*5.0</answer>", False),
        ("<answer>3/(4-4)*5</answer>", False),
        ("<answer></answer>", False),
        ("<answer>" + "(" * 5000 + "</answer>", False),
        ("<answer>-3+4*5</answer>", False),
    ],
)
def test_verifier(text, right):
    assert solves(text, [3, 4, 5], 35) is right


def test_verifier_is_exact_where_floats_are_not():
    assert solves("<answer>6/(1-3/4)</answer>", [1, 3, 4, 6], 24)
    assert not solves("<answer>(1/3+1/3+1/3)*3</answer>", [1, 3, 1, 3, 1, 3, 3], 2)


def test_reward_reads_text_and_chat():
    texts = ["<answer>1+2</answer>", [{"role": "assistant", "content": "<answer>2-1</answer>"}]]
    assert reward(completions=texts, numbers=[[1, 2], [1, 2]], target=[3, 3]) == [1.0, 0.0]


@given(st.integers(0, 10**6), st.sampled_from(["easy", "medium", "hard"]))
@settings(max_examples=200, deadline=None)
def test_traces_are_true_and_end_right(search_traces, seed, level):
    """Each move in a trace is correct arithmetic on numbers at hand, and a found answer solves the problem."""
    r = random.Random(seed)
    problem = make_problem(LEVELS[level], r)
    text = search_traces.full_answer(problem, search_traces.Searcher.draw(r), r)
    thoughts = text.split("<think>\n")[1].split("</think>")[0]
    for move in thoughts.replace(",", "\n").replace("!", "\n").splitlines():
        if not move:
            continue
        left, _, right = move.partition("=")
        assert eval(left) == int(right.split(":")[0])
    found = "!" in thoughts
    assert solves(text, list(problem.numbers), problem.target) is found
    assert found or text.endswith("<answer>?</answer>")


def test_every_step_of_the_tail_has_the_same_mix():
    task, mixes = Countdown("tail"), []
    for start in (0, 5, 16):
        counts = [len(task.sample(start + i).columns["numbers"]) for i in range(len(TAIL))]
        mixes.append(sorted(counts))
        assert counts == [len(task.sample(start + len(TAIL) + i).columns["numbers"]) for i in range(len(TAIL))]
    assert len(TAIL) == 16 and mixes[0] == mixes[1] == mixes[2] == [3] * 7 + [4] * 7 + [5, 6]


def test_searching_the_tail_has_a_tail(search_traces):
    """As real reasoning: p99 at least eight times p50, and nothing beyond what a context of 9k holds."""
    r = random.Random(1)
    lengths = []
    for i in range(1024):
        problem = make_problem(TAIL[i % len(TAIL)], r)
        searcher = search_traces.Searcher.draw_patient(r, len(problem.numbers))
        lengths.append(len(search_traces.full_answer(problem, searcher, r)))
    lengths.sort()
    p50, p99 = lengths[512], lengths[1013]
    assert p99 > 8 * p50 and 4000 < lengths[-1] < 8192


def test_unknown_difficulty_is_said():
    with pytest.raises(UserError, match=r"easy, medium, hard, expert"):
        Countdown("nightmare")
