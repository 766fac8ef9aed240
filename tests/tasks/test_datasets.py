"""JSONL, parquet and gym, in TRL's form and in verl's."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config import TaskConfig
from paceline.errors import UserError
from paceline.tasks import make_task
from paceline.tasks.rewards import judge, load_reward
from paceline.tasks.tasks import choose_style

TRL_ROWS = [{"prompt": f"What is {i}+1?", "answer": str(i + 1), "kind": "sum"} for i in range(7)]
VERL_ROWS = [
    {
        "data_source": "lighteval/MATH",
        "prompt": [{"role": "user", "content": f"{i} squared?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i * i)},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(5)
]


def task(name, **settings):
    return make_task(TaskConfig(name=str(name), **settings), seed=0, style="chat")


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_trl_form(tmp_path, suffix):
    data = task(write(tmp_path / f"d{suffix}", TRL_ROWS), shuffle=False)
    sample = data.sample(9)  # the second time round
    assert sample.prompt == "What is 2+1?" and sample.columns == {"answer": "3", "kind": "sum"}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_verl_form(tmp_path, suffix):
    sample = task(write(tmp_path / f"d{suffix}", VERL_ROWS), shuffle=False).sample(3)
    assert sample.prompt == [{"role": "user", "content": "3 squared?"}]
    assert sample.columns["ground_truth"] == "9" and sample.columns["data_source"] == "lighteval/MATH"
    assert sample.columns["extra_info"]["index"] == 3


def test_shuffled_epochs_visit_everything_once(tmp_path):
    data = task(write(tmp_path / "d.jsonl", TRL_ROWS))
    epochs = [[data.sample(e * 7 + i).prompt for i in range(7)] for e in range(3)]
    assert all(sorted(e) == sorted(epochs[0]) for e in epochs) and len({tuple(e) for e in epochs}) == 3


def test_system_message_is_put_first(tmp_path):
    data = task(write(tmp_path / "d.jsonl", TRL_ROWS), shuffle=False, system="Be brief.")
    assert [m["role"] for m in data.sample(0).prompt] == ["system", "user"]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "holds no samples"),
        ([{"question": "x"}], "no column 'prompt'.*question"),
        ([{"prompt": ""}], "empty prompt"),
        ([{"prompt": [{"text": "x"}]}], "neither text nor messages"),
    ],
)
def test_bad_data_is_said(tmp_path, rows, problem):
    with pytest.raises(UserError, match=problem):
        task(write(tmp_path / "d.jsonl", rows))


def test_broken_files_are_said(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    with pytest.raises(UserError, match="line 2"):
        task(tmp_path / "d.jsonl")
    (tmp_path / "d.parquet").write_text("not parquet")
    with pytest.raises(UserError, match="parquet"):
        task(tmp_path / "d.parquet")
    with pytest.raises(UserError, match="no data set at"):
        task(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="not a task"):
        task("soduko")


def test_gym_tasks_by_name():
    gym = task("gym:basic_arithmetic", options={"min_terms": 2, "max_terms": 3})
    sample = gym.sample(4)
    assert sample.prompt[0]["role"] == "user" and sample == gym.sample(4)
    reward = load_reward("gym")
    answer = sample.columns["entry"]["answer"]
    assert judge([reward], sample, f"so <answer>{answer}</answer>", []) == {"gym": 1.0}
    assert judge([reward], sample, "<answer>no idea</answer>", [])["gym"] < 1


def test_unknown_gym_task_names_close_ones():
    with pytest.raises(UserError, match="basic_arithmetic"):
        task("gym:basic_aritmetic")
    with pytest.raises(UserError, match="options"):
        task("gym:basic_arithmetic", options={"flavour": 3})


def test_style_follows_the_model():
    assert choose_style("auto", {"paceline": {"style": "search"}}, True) == "search"
    assert choose_style("auto", {}, True) == "chat"
    assert choose_style("auto", {}, False) == "text"
    assert choose_style("text", {"paceline": {"style": "search"}}, True) == "text"
