"""pass@k and best@k against counting all subsets; standard errors against simulation."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from paceline.evaluation.metrics import eval_metrics
from paceline.evaluation.paired import compare_scores, standard_error, student_t
from paceline.evaluation.scores import EvalScores, PromptScores, best_of_k, pass_at_k
from paceline.evaluation.text import describe_difference, describe_scores


@pytest.mark.parametrize(("n", "k"), [(n, k) for n in (1, 2, 5, 7) for k in range(1, n + 1)])
def test_pass_and_best_are_means_over_all_subsets(n, k):
    dice = random.Random(100 * n + k)
    rewards = [dice.choice([0.0, 0.0, 0.3, 1.0, 1.0, 1.2]) for _ in range(n)]
    subsets = list(itertools.combinations(rewards, k))
    passing = sum(reward >= 1 for reward in rewards)
    assert pass_at_k(n, passing, k) == pytest.approx(statistics.fmean(max(s) >= 1 for s in subsets))
    assert best_of_k(rewards, k) == pytest.approx(statistics.fmean(max(s) for s in subsets))


def test_pass_at_k_is_unbiased():
    """Of answers that pass with probability p, one of k does with 1 - (1 - p)^k; the naive estimate of that from the
    share that passed is too low."""
    dice = random.Random(1)
    p, n, k = 0.2, 8, 4
    counts = [sum(dice.random() < p for _ in range(n)) for _ in range(40_000)]
    assert statistics.fmean(pass_at_k(n, c, k) for c in counts) == pytest.approx(1 - (1 - p) ** k, abs=0.005)
    assert statistics.fmean(1 - (1 - c / n) ** k for c in counts) < 1 - (1 - p) ** k - 0.02


def scores_of(rewards: list[list[float]], ks: list[int] | None = None, **fields) -> EvalScores:
    prompts = [PromptScores("data", row, [10] * len(row), **fields) for row in rewards]
    return EvalScores(prompts, ks or [1])


def test_weights_that_add_up_to_the_pass_reward_pass():
    assert scores_of([[0.7 + 0.2 + 0.1]]).value("pass@1") == 1.0
    assert 0.7 + 0.2 + 0.1 < 1.0


def test_standard_errors_are_those_of_many_evaluations():
    """Two policies of which the second flips one answer in ten to a new throw. Evaluated thousands of times, paired,
    with dice of their own on the same prompts, and on prompts of their own: each difference scatters as was said."""
    dice = random.Random(2)
    prompts, samples, repeats = 40, 4, 1500

    def answers(chances: list[float]) -> list[list[float]]:
        return [[float(dice.random() < chance) for _ in range(samples)] for chance in chances]

    paired, other, unpaired = [], [], []
    said: dict[str, list[float]] = {"paired": [], "other": [], "unpaired": []}
    for _ in range(repeats):
        chances = [dice.choice([0.1, 0.5, 0.9]) for _ in range(prompts)]
        a = answers(chances)
        b = [
            [x if dice.random() < 0.9 else float(dice.random() < c) for x in row]
            for row, c in zip(a, chances, strict=True)
        ]
        alone = answers(chances)
        elsewhere = answers([dice.choice([0.1, 0.5, 0.9]) for _ in range(prompts)])
        d = compare_scores(scores_of(a), scores_of(b))
        mean = lambda rows: statistics.fmean(x for row in rows for x in row)  # noqa: E731
        assert d.difference == pytest.approx(mean(a) - mean(b))
        paired.append(d.difference)
        other.append(mean(a) - mean(alone))
        unpaired.append(mean(a) - mean(elsewhere))
        said["paired"].append(d.se**2)
        said["other"].append(d.se_other_dice**2)
        said["unpaired"].append(d.se_unpaired**2)
    for name, seen in (("paired", paired), ("other", other), ("unpaired", unpaired)):
        assert math.sqrt(statistics.fmean(said[name])) == pytest.approx(statistics.stdev(seen), rel=0.06), name
    assert statistics.stdev(paired) < 0.5 * statistics.stdev(other) < 0.5 * statistics.stdev(unpaired)


def test_the_interval_holds_in_95_of_100():
    dice = random.Random(3)
    inside = 0
    for _ in range(3000):
        rows = [[dice.gauss(0, 1)] for _ in range(8)]
        shifted = [[row[0] - 0.3 + dice.gauss(0, 0.5)] for row in rows]
        d = compare_scores(scores_of(rows), scores_of(shifted))
        inside += d.low < 0.3 < d.high
    assert inside / 3000 == pytest.approx(0.95, abs=0.012)


def test_students_quantile():
    for df, value in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (30, 2.0423)):
        assert student_t(df) == pytest.approx(value, rel=2e-3)
    assert student_t(10**6) == pytest.approx(1.95996, rel=1e-4)


def test_one_prompt_and_no_change():
    one = compare_scores(scores_of([[1.0]]), scores_of([[0.0]]))
    assert math.isnan(one.se) and math.isnan(one.low) and "no standard error" in describe_difference(one, "since")
    same = compare_scores(scores_of([[1.0], [0.0]]), scores_of([[1.0], [0.0]]))
    assert same.changed == 0 and same.se == 0 and "the same on all 2 prompts" in describe_difference(same, "since")
    assert math.isnan(standard_error([1.0]))


def test_functions_without_an_opinion_are_left_out():
    scores = EvalScores(
        [
            PromptScores("d", [1.0, 0.0], [5, 6], values={"f": [1.0, None]}),
            PromptScores("d", [1.0, 0.0], [5, 6], values={"f": [None, None]}),
            PromptScores("d", [1.0, 0.0], [5, 6], values={"f": [0.0, 0.5]}),
        ],
        [1, 2],
    )
    assert scores.value("f") == pytest.approx((1.0 + 0.25) / 2)
    assert compare_scores(scores, scores, "f").prompts == 2


def test_names_are_those_of_verl():
    prompts = [
        PromptScores("gsm8k", [1.0, 0.0, 0.0, 0.5], [10, 20, 30, 40], 1, {"f": [1.0, 0.0, 0.0, 1.0]}, greedy=1.0),
        PromptScores("openai/math", [0.0] * 4, [10] * 4, 0, {"f": [0.0] * 4}, greedy=0.0),
    ]
    metrics = eval_metrics(EvalScores(prompts, [1, 2, 4]))
    assert metrics["val-core/gsm8k/reward/mean@4"] == 0.375
    assert metrics["val-core/gsm8k/reward/best@4/mean"] == 1.0
    assert metrics["val-aux/gsm8k/reward/best@2/mean"] == pytest.approx((1 * 3 + 0.5 * 2) / 6)
    assert metrics["val-aux/gsm8k/reward/std@4"] == pytest.approx(statistics.pstdev([1.0, 0.0, 0.0, 0.5]))
    assert metrics["val-core/gsm8k/pass@1"] == 0.25 and metrics["val-core/gsm8k/pass@4"] == 1.0
    assert metrics["val-core/gsm8k/greedy/mean@1"] == 1.0 and metrics["val-aux/gsm8k/f/mean@4"] == 0.5
    assert metrics["val-aux/gsm8k/response_length/clip_ratio"] == 0.25
    assert metrics["val-core/openai/math/reward/mean@4"] == 0.0


def test_a_line_fits_a_terminal():
    scores = scores_of([[1.0, 0.0, 0.3, 0.2]] * 3, [1, 2, 4], greedy=0.5)
    assert describe_scores(scores) == "reward 0.375 ± 0.000  pass@1 0.250  pass@4 1.000  greedy 0.500"
    assert len(f"eval 100  {describe_scores(scores)}  12.3 s") <= 80
