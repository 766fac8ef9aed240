"""Reward functions: both signatures, several with weights, and everything that they can do wrong."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from paceline.core import Sample
from paceline.errors import UserError
from paceline.tasks.reward_call import FinishedAnswer
from paceline.tasks.reward_pool import RewardPool
from paceline.tasks.rewards import Reward, compute_rewards, load_reward, total

SAMPLE = Sample(3, "2+2?", {"answer": "4", "ground_truth": "4", "data_source": "sums", "extra_info": {"hint": 1}})
CHAT = Sample(4, [{"role": "user", "content": "2+2?"}], SAMPLE.columns)

FILE = textwrap.dedent("""
    import asyncio, os, sys, time

    def trl(prompts, completions, answer, **columns):
        assert len(prompts) == len(completions) == len(answer) == 1
        return [float(answer[0] in completions[0])]

    def trl_chat(completions, **columns):
        return [1.0 if completions[0][0]["role"] == "assistant" else 0.0]

    async def trl_async(completions, **columns):
        await asyncio.sleep(0)
        return [0.25]

    def uses_ids(completions, completion_ids, **columns):
        return [float(len(completion_ids[0]))]

    def no_opinion(completions, **columns):
        return [None]

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": 2.0 if ground_truth in solution_str and extra_info["hint"] == 1 else 0.0, "acc": True}

    def short_verl(solution_str, ground_truth):
        return solution_str == ground_truth

    def raises(completions, **columns):
        raise KeyError("colour")

    def nan(completions, **columns):
        return [float("nan")]

    def words(completions, **columns):
        return ["good"]

    def wrong_count(completions, **columns):
        return [1.0, 2.0]

    def not_a_list(completions, **columns):
        return 1.0

    def hangs(completions, **columns):
        if completions[0] == "slow":
            time.sleep(60)
        return [1.0]

    def exits(completions, **columns):
        if completions[0] == "slow":
            os._exit(3)
        return [1.0]

    def prints(completions, **columns):
        print("hello from a reward"); sys.stderr.write("and goodbye\\n")
        return [1.0]

    def strange(text, other):
        return 1.0

    value = 3
""")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FILE)
    return path


def collected(pool):
    out = []
    while pool.open:
        out += pool.collect(block=True)
    return out


def results(functions, texts, sample=SAMPLE, **settings):
    pool = RewardPool(functions, **settings)
    try:
        pool.ready()
        for i, text in enumerate(texts):
            pool.submit(i, sample, text, [1, 2, 3])
        out = {v.request_id: v for v in collected(pool)}
    finally:
        pool.close()
    return [out[i] for i in range(len(texts))]


def value(reward: Reward, sample: Sample, text: str) -> object:
    return compute_rewards(reward, [FinishedAnswer(0, sample, text, [])])[0]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_both_signatures_and_weights(file, workers):
    functions = [(f"{file}:trl", 1.0), (f"{file}:compute_score", 0.5), (f"{file}:no_opinion", 9.0)]
    right, wrong = results(functions, ["it is 4", "it is 5"], workers=workers)
    assert right.error is None and total(functions, right.values) == 2.0
    assert total(functions, wrong.values) == 0.0
    assert f"{file}:no_opinion" not in right.values


def test_more_forms(file):
    names = ("trl_async", "uses_ids", "short_verl")
    (result,) = results([(f"{file}:{n}", 1.0) for n in names], ["4"])
    assert list(result.values.values()) == [0.25, 3.0, 1.0]
    (result,) = results([(f"{file}:trl_chat", 1.0)], ["4"], sample=CHAT)
    assert list(result.values.values()) == [1.0]


def test_by_module_name(file, monkeypatch):
    monkeypatch.syspath_prepend(str(file.parent))
    assert value(load_reward("mine:trl"), SAMPLE, "4") == 1.0


def test_built_in_rewards():
    exact, math = load_reward("exact_match"), load_reward("math")
    assert value(exact, SAMPLE, "thinking\n<answer> 4 </answer>") == 1.0
    assert value(exact, SAMPLE, "so\n4") == 1.0 and value(exact, SAMPLE, "5") == 0.0
    half = Sample(0, "?", {"solution": r"\frac{1}{2}"})
    assert value(math, half, r"It is $\boxed{0.5}$.") == 1.0
    assert value(math, half, r"It is $\boxed{2}$.") == 0.0
    countdown = load_reward("countdown")
    assert value(countdown, Sample(0, "?", {"numbers": [1, 2], "target": 3}), "<answer>1+2</answer>") == 1.0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", "raised KeyError: 'colour'"),
        ("nan", "returned nan"),
        ("words", "not a number"),
        ("wrong_count", "instead of a list with one value"),
        ("not_a_list", "instead of a list with one value"),
    ],
)
def test_what_goes_wrong_is_part_of_the_result(file, name, problem, workers):
    (result,) = results([(f"{file}:{name}", 1.0)], ["x"], workers=workers)
    assert f"{file}:{name}" in result.error and problem in result.error


@pytest.mark.parametrize(("name", "problem"), [("hangs", "took longer than 2 s"), ("exits", "ended its process")])
def test_a_lost_process_costs_one_answer(file, name, problem):
    texts = ["ok", "ok", "slow", "ok", "ok"]
    got = results([(f"{file}:{name}", 1.0)], texts, timeout_s=2)  # what a busy machine may take for the others
    assert [v.error is None for v in got] == [True, True, False, True, True]
    assert f"{file}:{name}" in got[2].error and problem in got[2].error


def test_a_process_that_ended_before_it_was_asked_costs_nothing(file):
    pool = RewardPool([(f"{file}:exits", 1.0)], workers=1, timeout_s=60)
    try:
        pool.ready()
        pool._processes[0].child.process.kill()
        pool._processes[0].child.process.wait()
        pool.submit(0, SAMPLE, "ok", [1])
        [result] = collected(pool)
    finally:
        pool.close()
    assert result.request_id == 0 and result.error is None


def test_more_answers_for_a_process_that_is_ending(file):
    pool = RewardPool([(f"{file}:exits", 1.0)], workers=1, timeout_s=60)
    try:
        pool.ready()
        pool.submit(0, SAMPLE, "slow", [1])
        pool._processes[0].child.process.wait()  # it is gone, and nobody has looked yet
        pool.submit(1, SAMPLE, "ok", [1])
        out = {v.request_id: v for v in collected(pool)}
    finally:
        pool.close()
    assert "ended its process" in out[0].error and out[1].error is None


def test_what_rewards_print_goes_to_a_file(file, tmp_path, capfd):
    results([(f"{file}:prints", 1.0)], ["x"], log=tmp_path / "rewards.log")
    assert "hello from a reward" in (log := (tmp_path / "rewards.log").read_text()) and "goodbye" in log
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("countdwn", "no reward is called 'countdwn'"),
        ("{file}:nothing", "has no function 'nothing'"),
        ("{file}:value", "has no function 'value'"),
        ("{file}:strange", r"takes \(text, other\)"),
        ("nosuchmodule:f", "cannot be imported"),
        ("/nowhere/at/all.py:f", "no file at"),
    ],
)
def test_rewards_that_cannot_be_used_are_said_before_the_run(file, name, problem, workers):
    with pytest.raises(UserError, match=problem):
        results([(name.format(file=file), 1.0)], [], workers=workers)


def test_rewards_run_beside_the_caller(file):
    """Handing in an answer does not wait for its result."""
    pool = RewardPool([(f"{file}:hangs", 1.0)], timeout_s=30)
    pool.ready()
    pool.submit(0, SAMPLE, "slow", [])
    pool.submit(1, SAMPLE, "ok", [])
    assert pool.collect() == [] and pool.open == 2
    pool.close()


def test_a_reward_of_ones_own_touches_no_file_of_the_package():
    """It is a function in a file of the user's, named in a setting: here the one of examples/."""
    example = Path(__file__).parents[2] / "examples" / "custom_reward.py"
    name = f"{example}:right_and_brief"
    sample = Sample(0, "?", {"numbers": [1, 2], "target": 3})
    right, wrong = results([(name, 1.0)], ["<answer>1+2</answer>", "<answer>1-2</answer>"], sample)
    assert 1.0 < right.values[name] < 1.2 and wrong.values[name] == 0.0
