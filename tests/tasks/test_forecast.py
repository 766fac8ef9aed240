"""Forecasts: days are split by time, the scoring rules are proper, answers are read as they are meant."""

from __future__ import annotations

import csv
import json
import math
import random
from datetime import date, timedelta
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import TaskConfig, load_config
from paceline.errors import UserError
from paceline.tasks import make_task
from paceline.tasks.forecast import Forecast
from paceline.tasks.forecast.scores import (
    LEVELS,
    WORST,
    Prediction,
    parse_prediction,
    quantile_score,
    ranked_score,
    score,
)
from paceline.tasks.forecast.task import reward

from ..conftest import benchmark
from ..test_cli import here

forecast_baselines = benchmark("forecast_baselines")


@pytest.fixture
def prices(tmp_path):
    """Two years of days with calm and wild months."""
    dice = random.Random(0)
    day, price, rows = date(2020, 1, 1), 100.0, []
    for n in range(700):
        price *= math.exp(dice.gauss(0, 0.003 if (n // 60) % 2 else 0.02))
        rows.append({"date": (day + timedelta(n)).isoformat(), "value": f"{price:.6f}"})
    file = tmp_path / "prices.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, ["date", "value"])
        writer.writeheader()
        writer.writerows(rows)
    return file


def make(name: object, split: str = "train", style: str = "text", **options: object) -> Forecast:
    return make_task(TaskConfig(name=f"forecast:{name}", split=split, shuffle=False, options=options), 0, style)


def test_a_sample_shows_the_days_before_and_knows_the_next_one(prices):
    task = make(prices, window=5, decimals=4)
    values = [float(row["value"]) for row in csv.DictReader(prices.open())]
    returns = [100 * math.log(b / a) for a, b in pairwise(values)]
    for index in (0, 7, 100):
        sample = task.sample(index)
        assert sample.columns["outcome"] == pytest.approx(returns[index + 5])
        shown = " ".join(f"{r:+.4f}" for r in returns[index : index + 5])
        assert shown in sample.prompt and sample.columns["day"] in sample.where
    assert task.sample(3) == make(prices, window=5, decimals=4).sample(3)


def test_days_are_split_by_time_and_what_is_usual_is_known_before(prices):
    train, test = (make(prices, split, test_from="2021-06-01") for split in ("train", "test"))
    days = {
        split: [one.sample(i).columns["day"] for i in range(len(one))]
        for split, one in (("train", train), ("test", test))
    }
    assert max(days["train"]) < "2021-06-01" <= min(days["test"])
    assert len(set(days["train"]) | set(days["test"])) == 700 - 21
    assert vars(train.climate) == vars(test.climate)
    outcomes = [train.sample(i).columns["outcome"] for i in range(len(train))]
    assert train.climate.quantiles == pytest.approx(np.quantile(outcomes, LEVELS))
    regimes = [train.sample(i).columns["regime"] for i in range(len(train))]
    assert [regimes.count(k) / len(regimes) for k in range(3)] == pytest.approx([0.5, 0.35, 0.15], abs=0.01)


def test_days_may_be_written_without_quotes():
    config = load_config(None, ["task.options={test_from: 2021-05-01}"])
    assert config.task.options == {"test_from": "2021-05-01"}, "YAML takes it for a date"


def test_what_comes_later_changes_nothing(prices):
    lines = prices.read_text().splitlines()
    shorter = prices.with_name("shorter.csv")
    shorter.write_text("\n".join(lines[:600]) + "\n")
    whole, cut = (make(file, test_from="2021-05-01") for file in (prices, shorter))
    assert all(whole.sample(i).columns == cut.sample(i).columns for i in range(400))
    assert vars(whole.climate) == vars(cut.climate)


def test_the_styles(prices):
    chat = make(prices, style="chat").sample(0).prompt
    assert chat[0]["role"] == "user" and "<answer>" in chat[0]["content"]
    bare = make(prices, style="search", window=3).sample(0).prompt
    assert len(bare.split()) == 3 and bare.endswith("\n")


def test_series_that_arch_ships():
    pytest.importorskip("arch")
    task = make("sp500", "test", test_from="2014-01-01")
    first = task.sample(0).columns
    assert first["day"] == "2014-01-02" and len(task) == 1258
    assert make("vix", "train").series.values.min() > 5


@pytest.mark.parametrize(
    ("text", "quantiles"),
    [
        ("<answer>-1.5 -0.4 0.05 0.5 1.4 50 35 15</answer>", (-1.5, -0.4, 0.05, 0.5, 1.4)),
        ("I think\n-1 0 0 0 1 | 0.5, 0.3, 0.2", (-1, 0, 0, 0, 1)),
        ("The answer is -2, -1, 0, 1, 2, 20, 30, 50.", (-2, -1, 0, 1, 2)),
    ],
)
def test_predictions_are_read(text, quantiles):
    found = parse_prediction(text)
    assert found is not None and found.quantiles == quantiles and sum(found.regimes) == pytest.approx(1)


@pytest.mark.parametrize(
    "text",
    ["", "no numbers", "<answer>1 2 3</answer>", "<answer>2 1 0 1 2 50 35 15</answer>",
     "<answer>-1 0 0 0 1 0 0 0</answer>", "<answer>-1 0 0 0 1 -5 50 50</answer>",
     "<answer>-1 0 0 0 99999 50 35 15</answer>", "-1 0 0 0 1 50 35 15 7"],
)  # fmt: skip
def test_what_is_no_prediction(text):
    assert parse_prediction(text) is None
    assert reward([text], [0.3], [1], [2.0]) == [-1.0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.floats(-0.6, 0.6), min_size=5, max_size=5))
def test_the_quantile_score_is_proper(seed, off):
    """Over many outcomes, some of them far out, no other quantiles score better than their own."""
    outcomes = np.random.default_rng(seed).standard_t(2, 401)
    own = np.quantile(outcomes, LEVELS)
    other = np.sort(own + np.array(off))
    best, found = (sum(quantile_score(q, y, 2.0) for y in outcomes) for q in (own, other))
    assert best <= found + 1e-9


@settings(max_examples=100, deadline=None)
@given(*[st.lists(st.floats(0.0, 1), min_size=3, max_size=3).filter(lambda x: sum(x) > 0.1)] * 2)
def test_the_ranked_score_is_proper(truth, said):
    p, q = (np.array(x) / sum(x) for x in (truth, said))
    best, found = (sum(p[k] * ranked_score(other, k) for k in range(3)) for other in (p, q))
    assert best <= found + 1e-12


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1000, 1000), min_size=5, max_size=5).map(sorted),
    st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda x: sum(x) > 0.1),
    st.floats(-1000, 1000),
    st.integers(0, 2),
)
def test_no_forecast_is_worse_than_none(quantiles, weights, outcome, regime):
    found = score(Prediction(tuple(quantiles), tuple(w / sum(weights) for w in weights)), outcome, regime, 2.0)
    assert WORST - 1e-9 <= found <= 1 + 1e-9


def test_knowing_and_being_wrong():
    assert score(Prediction((0.3,) * 5, (0, 0, 1)), 0.3, 2, 2.0) == pytest.approx(1.0)
    assert score(Prediction((900.0,) * 5, (1, 0, 0)), -900.0, 2, 2.0) == pytest.approx(WORST)
    usual = quantile_score((-1, 0, 0, 0, 1), 0.5, 1e9)
    assert usual == pytest.approx(2 / 5 * (0.05 * 1.5 + (0.25 + 0.5 + 0.75) * 0.5 + 0.05 * 0.5)), "without a bound"


@pytest.mark.parametrize(
    ("name", "options", "split", "sentence"),
    [
        ("gold", {}, "train", "'forecast:gold' is no series: use sp500, nasdaq, vix, wti"),
        ("PRICES", {"windw": 3}, "train", "task.options.windw: Extra inputs are not permitted; forecast takes window"),
        ("PRICES", {"window": 0}, "train", "task.options.window: "),
        ("PRICES", {}, "validation", "task.split = 'validation' is not a part of forecast:"),
        ("PRICES", {"test_from": "2030-01-01"}, "test", "0 to test on"),
        ("PRICES", {"value_column": "close"}, "train", "row 0 (counted from 0) of "),
        ("missing.csv", {}, "train", "no file at missing.csv"),
    ],
)
def test_what_is_wrong_is_said(prices, name, options, split, sentence):
    with pytest.raises(UserError) as error:
        make(prices if name == "PRICES" else name, split, **options)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [("2021-13-01,1", "is not a day"), ("2021-12-31,x", "is not a day"), ("2022-12-31,-1", "need positive ones"),
     ("2022-12-31,nan", "need positive ones"), ("2020-01-01,5", "its days must be in order")],
)  # fmt: skip
def test_bad_rows_are_named(prices, row, sentence):
    with prices.open("a") as out:
        out.write(row + "\n")
    with pytest.raises(UserError, match=sentence):
        make(prices)


def test_jsonl_has_days_and_values_too(prices, tmp_path):
    file = tmp_path / "prices.jsonl"
    rows = [{"day": row["date"], "close": float(row["value"])} for row in csv.DictReader(prices.open())]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert make(file, day_column="day", value_column="close").sample(5).columns == make(prices).sample(5).columns


def test_a_run_learns_from_it(prices, tmp_path, capsys):
    words = ["steps=1", "rollout.prompts=2", "rollout.samples=2", "rollout.max_tokens=12", "log.tensorboard=false"]
    words += ["cluster.workers=1", "model.threads=1", "task.style=text", f"run_dir={tmp_path / 'run'}"]
    words += ["task.options={window: 3}", "task.max_prompt_tokens=900"]
    assert here("train", "model.path=embedded", f"task.name=forecast:{prices}", *words) == 0, capsys.readouterr().err
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["reward/forecast"] == -1.0, "the embedded reasoner forecasts nothing"


def test_volatility_can_be_forecast_and_is(forecast_baselines, prices, capsys):
    pytest.importorskip("arch")
    found = forecast_baselines.main(["--series", str(prices)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    scores = found["series"][0]["scores"]
    assert scores["GARCH"]["skill"] > 0.02 and scores["climatology"]["skill"] == 0
    assert scores["scaled history"]["ranked"] < scores["climatology"]["ranked"]
