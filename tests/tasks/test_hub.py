"""Data sets with configurations, splits and several files, streamed or not, from folders laid out as on the hub."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("datasets")

from paceline.config import TaskConfig, load_config
from paceline.errors import UserError
from paceline.tasks import make_task
from paceline.tasks.hub import HubName

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: "main/train-*.parquet"}
  - {split: test, path: main/test.parquet}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train.parquet}
---
"""


def rows(kind, start, count):
    return [{"question": f"{kind} {i}?", "answer": f"#### {i}"} for i in range(start, start + count)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two configurations, of which one has two files and a second split; beside it a folder with a JSON array."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    home = tmp_path / "sums"
    (home / "main").mkdir(parents=True)
    (home / "socratic").mkdir()
    (home / "README.md").write_text(CARD)
    for part in range(2):
        pq.write_table(pa.Table.from_pylist(rows("main", 20 * part, 20)), home / "main" / f"train-{part}.parquet")
    pq.write_table(pa.Table.from_pylist(rows("test", 0, 3)), home / "main" / "test.parquet")
    pq.write_table(pa.Table.from_pylist(rows("socratic", 0, 5)), home / "socratic" / "train.parquet")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.json").write_text(json.dumps(rows("plain", 0, 4), indent=1))
    return home


def task(name, **settings):
    return make_task(TaskConfig(**{"name": str(name), "prompt_column": "question"} | settings), seed=3, style="chat")


def epoch(data, count):
    return sorted(data.sample(i).prompt for i in range(count))


def texts(kind, count):
    return sorted(f"{kind} {i}?" for i in range(count))


@pytest.mark.parametrize("streaming", [False, True])
def test_configurations_and_splits(folder, streaming):
    how = {"streaming": streaming}
    assert epoch(task(f"{folder}:main", **how), 40) == texts("main", 40), "of both files"
    assert epoch(task(f"{folder}:socratic", **how), 5) == texts("socratic", 5)
    assert epoch(task(folder.parent / "plain", **how), 4) == texts("plain", 4)
    assert epoch(task(f"{folder}:main", split="test", **how), 3) == texts("test", 3)
    if not streaming:
        assert epoch(task(f"{folder}:main", split="train[:5]+test"), 8) == [*texts("main", 5), *texts("test", 3)]


def test_what_there_is_not_is_told_with_what_there_is(folder):
    with pytest.raises(UserError, match=r"has several configurations; name one of main, socratic, like .*sums:main"):
        task(folder)
    with pytest.raises(UserError, match=r"no configuration 'mian'; name one of main, socratic"):
        task(f"{folder}:mian")
    with pytest.raises(UserError, match=r"no split 'validation'.*train.*test"):
        task(f"{folder}:main", split="validation")
    with pytest.raises(UserError, match=r"row 0 .*sums:main has no column 'prompt'.*question, answer"):
        task(f"{folder}:main", prompt_column="prompt")
    with pytest.raises(UserError, match=r"has no 'gold', which task.columns asks for; it has: question, answer"):
        task(f"{folder}:main", columns={"x": "gold"})


def test_names_of_the_hub():
    assert HubName.parse("openai/gsm8k") == HubName("openai/gsm8k")
    assert HubName.parse("openai/gsm8k:main") == HubName("openai/gsm8k", "main")
    assert HubName.parse("openai/gsm8k:main@e53f") == HubName("openai/gsm8k", "main", "e53f")
    assert HubName.parse("openai/gsm8k@e53f") == HubName("openai/gsm8k", None, "e53f")
    for wrong in ("", ":main", "a/b:", "a/b@"):
        with pytest.raises(UserError, match="write hub:OWNER/NAME"):
            HubName.parse(wrong)


def test_a_stream_is_a_function_of_its_index(folder):
    """However it is asked: forwards, again, from the middle as a resumed run does, in a second epoch."""
    data = task(f"{folder}:main", streaming=True)
    first = [data.sample(i).prompt for i in range(100)]
    assert sorted(first[:40]) == sorted(first[40:80]) == texts("main", 40)
    assert first[:40] != first[40:80] != texts("main", 40), "in an order of its own each time"
    assert [data.sample(i).prompt for i in (7, 93, 50)] == [first[i] for i in (7, 93, 50)]
    assert task(f"{folder}:main", streaming=True).sample(93).prompt == first[93]
    assert "of epoch 2 of" in data.sample(41).origin


def test_a_stream_takes_its_examples_from_the_beginning(folder):
    data = task(f"{folder}:main", streaming=True, template="{question}", few_shot=2, shuffle=False)
    prompt = data.sample(0).prompt
    assert [message["content"] for message in prompt] == ["main 0?", "#### 0", "main 1?", "#### 1", "main 2?"]
    assert data.sample(38).prompt == prompt, "the second epoch has the same 38"


def test_a_bad_row_of_a_stream_is_named_when_it_comes(folder):
    plain = folder.parent / "plain"
    (plain / "train.json").write_text(json.dumps([{"question": "a"}, {"question": None}]))
    data = task(plain, streaming=True, shuffle=False)
    assert data.sample(0).prompt == "a"
    with pytest.raises(UserError, match=r"row 1 \(counted from 0\) of epoch 1 of .*plain is null"):
        data.sample(1)


def test_several_files(tmp_path):
    parts = {"a.jsonl": rows("a", 0, 3), "b.jsonl": rows("b", 0, 2)}
    for name, part in parts.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, part)))
    (tmp_path / "c.json").write_text(json.dumps(rows("c", 0, 2)))
    for name in (f"{tmp_path}/*.json*", [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.json")]):
        config = load_config(None, [f"task.name={json.dumps(name)}", "model.path=x"]).task
        data = task(config.name, shuffle=False)
        assert epoch(data, 7) == [*texts("a", 3), *texts("b", 2), *texts("c", 2)]
        assert [data.sample(i).origin for i in (2, 3, 6)] == [
            f"line 3 of {tmp_path}/a.jsonl",
            f"line 1 of {tmp_path}/b.jsonl",
            f"row 1 (counted from 0) of {tmp_path}/c.json",
        ]
    many = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")] * 100  # longer than any path
    assert len(task(",".join(many)).numbers) == 5, "each once"
    (tmp_path / "odd,[1].jsonl").write_text(json.dumps(rows("odd", 0, 1)[0]))
    assert task(tmp_path / "odd,[1].jsonl").sample(0).prompt == "odd 0?"
    for name, problem in (
        (f"{tmp_path}/*.parquet", "no .jsonl, .json, .parquet file matches"),
        (f"{tmp_path}/a.jsonl,{tmp_path}/z.jsonl", "no data set at .*z.jsonl"),
        (f"{tmp_path}/a.jsonl,{tmp_path}", "is not a task"),
    ):
        with pytest.raises(UserError, match=problem):
            task(name)
    with pytest.raises(UserError, match=r"task\.streaming reads hub data sets and folders"):
        task(tmp_path / "a.jsonl", streaming=True)
