"""What reward functions are given in one call: a completion, a whole group, or what has arrived; what they may log."""

from __future__ import annotations

import json
import textwrap

import pytest

import paceline
from paceline.core import Sample
from paceline.errors import UserError
from paceline.library.trainer import Trainer
from paceline.observe.metrics import read_lines
from paceline.tasks.reward_call import MAX_NAMES, FinishedAnswer, RewardLog
from paceline.tasks.reward_errors import BadReward
from paceline.tasks.reward_pool import RewardPool
from paceline.tasks.rewards import as_reward, compute_rewards, load_reward

from ..test_cli import QUICK, here

FILE = textwrap.dedent("""
    import time
    from paceline import per

    def shortest(prompts, completions, **columns):
        '''Compares: only the shortest of those that it sees gets something.'''
        assert len(set(prompts)) == 1 and len(completions) == len(prompts)
        return [float(len(c) == min(map(len, completions))) for c in completions]

    @per("completion")
    def alone(completions, **columns):
        return [float(len(completions))]

    @per("arrived")
    def batched(completions, **columns):
        time.sleep(0.3)  # while others arrive
        return [float(len(completions))] * len(completions)

    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        return [{"score": float(len(solution_strs))} for _ in solution_strs]

    def of_one(data_source, solution_str, ground_truth):
        return float(solution_str == ground_truth)

    def one_bad(completions, **columns):
        return [float("nan") if c == "bad" else 1.0 for c in completions]

    def size(completions, **columns):
        return [float(len(completions))] * len(completions)

    def raises(completions, **columns):
        raise KeyError("colour")

    def logs(completions, log_metric, log_extra, **columns):
        log_metric("words", sum(len(c.split()) for c in completions) / len(completions))
        log_extra("first", [c[:1] for c in completions])
        return [1.0] * len(completions)

    @per("batch")
    def strange(completions):
        return [1.0]
""")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FILE)
    return path


def results(functions, groups, order=None, **settings):
    """Rewards of completions by group, finished in some order."""
    pool = RewardPool([(name, 1.0) for name in functions], **settings)
    ids = [(g, i) for g, texts in enumerate(groups) for i in range(len(texts))]
    try:
        pool.ready()
        for g, i in order or ids:
            sample = Sample(g, f"prompt {g}", {"ground_truth": "ab"})
            pool.submit(10 * g + i, sample, groups[g][i], [1], g, len(groups[g]))
        out = {}
        while pool.open:
            for result in pool.collect(block=True):
                assert result.request_id not in out
                out[result.request_id] = result
        return [[out[10 * g + i] for i in range(len(texts))] for g, texts in enumerate(groups)], pool.logged()
    finally:
        pool.close()


def values(found, name):
    return [[result.values.get(name) for result in group] for group in found[0]]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_function_that_compares_gets_the_whole_group(file, workers):
    name = f"{file}:shortest"
    groups = [["aa", "a", "aaa"], ["b", "bb", "b"]]
    order = [(1, 2), (0, 2), (0, 0), (1, 0), (0, 1), (1, 1)]
    found = results([name], groups, order, workers=workers)
    assert values(found, name) == [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]


@pytest.mark.parametrize("workers", [0, 2])
def test_functions_of_each_kind_side_by_side(file, workers):
    names = [f"{file}:{n}" for n in ("of_one", "shortest", "alone", "compute_score")]
    found = results(names, [["ab", "a", "abc"]], workers=workers)
    assert [list(result.values) for result in found[0][0]] == [names] * 3, "in the order of the settings"
    assert [values(found, name)[0] for name in names] == [[1, 0, 0], [0, 1, 0], [1, 1, 1], [3, 3, 3]]


def test_what_has_arrived_goes_together(file):
    name = f"{file}:batched"
    (found,) = values(results([name], [["x"] * 12]), name)
    assert sorted(set(found)) == [1.0, 11.0], "the first was alone, the others waited for it"
    assert values(results([name], [["x"] * 12], workers=0), name) == [[12.0] * 12]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_setting_decides_before_the_function_does(file, workers):
    name = f"{file}:batched"
    found = results([name], [["x", "y"], ["z", "z", "z"]], workers=workers, per={name: "group"})
    assert values(found, name) == [[2.0, 2.0], [3.0, 3.0, 3.0]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_value_costs_one_completion_and_an_error_the_call(file, workers):
    (group,), _ = results([f"{file}:one_bad"], [["ok", "bad", "ok"]], workers=workers)
    assert [result.error is None for result in group] == [True, False, True] and "returned nan" in group[1].error
    (group,), _ = results([f"{file}:raises", f"{file}:of_one"], [["ab", "b"]], workers=workers)
    assert all("raised KeyError: 'colour'" in result.error for result in group)
    assert [bool(result.trace) for result in group] == [True, False], "once is enough"


def test_a_group_has_as_many_times_as_long(file, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ndef f(completions, **_):\n    time.sleep(60)\n    return [1.0] * len(completions)\n")
    (group,), _ = results([f"{slow}:f"], [["x", "y"]], timeout_s=1)
    assert all("took longer than 2 s for 2 completions" in result.error for result in group)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_logged(file, workers):
    name = f"{file}:logs"
    (one, two), logged = results([name], [["a b", "c"], ["d e f", "g"]], workers=workers)
    assert logged == {"words": pytest.approx((1.5 + 2) / 2)}
    assert [result.extra for result in one + two] == [{"first": "a"}, {"first": "c"}, {"first": "d"}, {"first": "g"}]


def test_what_may_be_logged():
    log = RewardLog()
    log.metric("a", True)
    log.metric("a", float("nan"))
    assert log.metrics["a"].mean == 1.0
    with pytest.raises(BadReward, match="not a number"):
        log.metric("b", "many")
    with pytest.raises(BadReward, match="3 values as 'c' for 2 completions"):
        log.extra("c", [1, 2, 3], count=2)
    log.extra("d", [{"x": 1}, object(), "y" * 5000, None], count=4)
    kept = log.extras["d"]
    assert kept[0] == '{"x": 1}' and kept[1].startswith("<object") and len(kept[2]) == 1000 and kept[3] is None
    with pytest.raises(BadReward, match=f"more than {MAX_NAMES}"):
        for i in range(MAX_NAMES):
            log.metric(f"m{i}", i)


def test_what_a_function_asks_for_is_checked(file):
    with pytest.raises(UserError, match="asks to be called per 'batch'; there are: completion, group, arrived"):
        load_reward(f"{file}:strange")
    assert load_reward(f"{file}:strange", per="group").per == "group"
    assert [load_reward(name).per for name in ("math", "exact_match", "data_source")] == ["completion"] * 3
    assert paceline.per("arrived")(lambda completions: []).per == "arrived"


def test_a_group_of_values_that_do_not_fit(file):
    answers = [FinishedAnswer(i, Sample(0, "?"), "x", []) for i in range(2)]
    with pytest.raises(BadReward, match=r"returned \[1.0\] for 2 completions instead of a list with as many values"):
        compute_rewards(as_reward(lambda completions: [1.0], "f"), answers)


def test_a_run_with_functions_that_compare_and_log(file, tmp_path):
    """From the command: groups are whole in training and in evaluation, and what is logged is in the run."""
    run = tmp_path / "run"
    functions = [{"function": f"{file}:size"}, {"function": f"{file}:logs", "per": "arrived"}]
    words = [f"reward.functions={json.dumps(functions)}", f"run_dir={run}", "steps=2", "rollout.samples=4"]
    words += ["eval.task=countdown", "eval.prompts=2", "eval.samples=3", "eval.greedy=true"]
    assert here("train", *QUICK, *words) == 0
    rows = read_lines(run / "metrics.jsonl")
    assert all(row["words"] > 0 and row["reward/mine.py:size"] == 4 for row in rows)
    assert {row["val-core/countdown/reward/mean@3"] for row in rows[1:]} == {5.0}, "4 of a prompt, the greedy one too"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert all(sample["extra"]["first"] == sample["answer"][:1] for sample in samples)


def test_a_function_from_python_gets_the_whole_group(tmp_path):
    sizes = []

    def compare(completions, **columns):
        sizes.append(len(completions))
        return [float(text == max(completions)) for text in completions]

    settings = {"rollout.prompts": 2, "rollout.samples": 4, "rollout.max_tokens": 16, "log.tensorboard": False}
    Trainer("embedded", "countdown", compare, steps=1, run_dir=tmp_path / "run", settings=settings).train()
    assert sizes == [4, 4]
