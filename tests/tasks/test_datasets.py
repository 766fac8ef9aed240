"""JSONL, parquet and gym, in TRL's form and in verl's."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config import TaskConfig
from paceline.errors import UserError
from paceline.library.trainer import Trainer
from paceline.tasks import make_task
from paceline.tasks.datasets import DataSet
from paceline.tasks.reward_call import FinishedAnswer
from paceline.tasks.rewards import compute_rewards, load_reward
from paceline.tasks.tasks import choose_style
from paceline.tasks.wording import Wording

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
    texts = [f"so <answer>{answer}</answer>", "<answer>no idea</answer>"]
    right, wrong = (compute_rewards(reward, [FinishedAnswer(0, sample, text, [])])[0] for text in texts)
    assert right == 1.0 and wrong < 1


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


def test_json_holds_a_list_of_rows_or_a_row_in_each_line(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(TRL_ROWS, indent=1))
    write(tmp_path / "lines.json", TRL_ROWS)
    whole, lines = (task(tmp_path / name, shuffle=False) for name in ("list.json", "lines.json"))
    assert [whole.sample(i).prompt for i in range(7)] == [lines.sample(i).prompt for i in range(7)]
    assert whole.sample(2).origin.startswith("row 2 (counted from 0)") and lines.sample(2).origin.startswith("line 3")


def test_rows_of_the_datasets_library_are_checked_and_named():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([*VERL_ROWS, VERL_ROWS[0] | {"prompt": []}])
    with pytest.raises(UserError, match=r"row 5 \(counted from 0\) of hub:a/b is an empty list"):
        DataSet("hub:a/b", rows)
    with pytest.raises(UserError, match=r"no column 'question'.*prompt"):
        DataSet("hub:a/b", rows, Wording("question"))
    data = DataSet("hub:a/b", rows.select(range(5)), shuffle=False)
    assert data.sample(4).columns["ground_truth"] == "16" and data.sample(4).where == (
        "sample 4 (row 4 (counted from 0) of hub:a/b)"
    )

    def make(batch):
        return {"prompt": [7 if index == 3 else "x" for index in batch["index"]]}

    made = datasets.Dataset.from_dict({"prompt": ["x"] * 5, "index": list(range(5))}).with_transform(make)
    lazy = DataSet("made", made, shuffle=False)  # rows are made when they are asked for
    assert lazy.sample(2).prompt == "x"
    with pytest.raises(UserError, match=r"row 3 .* of made is a number"):
        lazy.sample(3)
    broken = DataSet("made", made.with_transform(lambda batch: {"prompt": [1 / 0]}), shuffle=False)
    with pytest.raises(UserError, match=r"row 1 .* of made cannot be read: ZeroDivisionError"):
        broken.sample(1)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"prompt": "a"}, {"prompt": "b", "check": lambda: 1}], r"column 'check' of row 1 .* reward process"),
        ([{"prompt": "a"}, {"prompt": "b", 3: 4}], r"row 1 .* a column named 3"),
        ([{"prompt": "a"}, "b"], r"row 1 .* is text, not an object"),
        ({"prompt": ["a", "b"]}, "of type dict, whose rows have no numbers"),
    ],
)
def test_rows_from_python_are_checked(rows, problem):
    with pytest.raises(UserError, match=problem):
        Trainer("embedded", rows, "exact_match")


def test_rows_may_hold_anything_for_rewards_that_are_functions():
    rows = [{"prompt": "a", "check": lambda text: 1.0}]
    Trainer("embedded", rows, lambda completions, check, **_: [f(c) for f, c in zip(check, completions, strict=True)])


def test_a_gym_task_without_samples():
    with pytest.raises(UserError, match=r"no samples|options"):
        task("gym:basic_arithmetic", options={"size": 0})
    with pytest.raises(UserError, match="options"):
        task("gym:basic_arithmetic", options={"size": "many"}).sample(0)
