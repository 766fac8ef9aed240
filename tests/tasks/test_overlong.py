"""Prompts that are too long: left out, cut or refused, counted and named by file and row."""

from __future__ import annotations

import json

import pytest

from paceline.config import TaskConfig, load_config
from paceline.core import Sample, SamplingParams
from paceline.errors import UserError
from paceline.model.tokenizer import load_tokenizer
from paceline.tasks import make_task
from paceline.tasks.prompts import MAX_SKIPPED, PromptStream

from ..tied import make_tied

CONTEXT = 41  # tokens of prompt and completion
LONG = 4, 9  # rows


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(make_tied(tmp_path_factory.mktemp("tied"))))


@pytest.fixture
def file(tmp_path):
    """Of 12 rows, two are too long; a character is a token, and the template adds three."""
    rows = [{"prompt": [{"role": "user", "content": f"{i:02}" * (25 if i in LONG else 3)}]} for i in range(12)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "d.jsonl"


def stream(name, tokenizer, said=None, task=None, **settings):
    words = [f"task.{key}={value}" for key, value in settings.items()]
    config = load_config(None, [f"task.name={name}", "model.path=x", "rollout.samples=2", *words])
    task = task or make_task(config.task, seed=0, style="chat")
    return PromptStream(task, tokenizer, SamplingParams(), config, CONTEXT, (said if said is not None else []).append)


def test_they_are_left_out_of_the_data(file, tokenizer):
    said = []
    prompts = stream(file, tokenizer, said)
    epoch = [prompts.group(i).sample.origin for i in range(10)]
    assert sorted(epoch, key=lambda text: int(text.split()[1])) == [
        f"line {i + 1} of {file}" for i in range(12) if i not in LONG
    ]
    assert [prompts.group(i).sample.origin for i in range(10, 20)] != epoch, "the next epoch has another order"
    assert said == [
        f"2 of 12 prompts of {file} have more tokens than the 40 of the model's context and are left out: "
        f"the first is line 5 of {file} with 53 (task.overlong_prompts)"
    ]
    again = stream(file, tokenizer)
    assert [again.group(i).sample.origin for i in range(10)] == epoch, "a function of settings and index"


def test_a_setting_bounds_them_too(file, tokenizer):
    said = []
    stream(file, tokenizer, said, max_prompt_tokens=30)
    assert "more tokens than the 30 of task.max_prompt_tokens" in said[0]
    said.clear()
    assert stream(file, tokenizer, said, max_prompt_tokens=1000).limit.most == 40, "the context is a bound too"
    with pytest.raises(UserError, match=r"all 12 prompts of .* have more tokens than the 8 of task.max_prompt_tokens"):
        stream(file, tokenizer, max_prompt_tokens=8)


@pytest.mark.parametrize(
    ("how", "kept"), [("left", slice(13, 53)), ("right", slice(0, 40)), ("middle", [*range(20), *range(33, 53)])]
)
def test_they_are_cut_as_verl_cuts(file, tokenizer, how, kept):
    said = []
    prompts = stream(file, tokenizer, said, overlong_prompts=how, shuffle="false")
    whole = tokenizer.encode_prompt([{"role": "user", "content": "04" * 25}])
    wanted = whole[kept] if isinstance(kept, slice) else [whole[i] for i in kept]
    assert prompts.group(4).prompt == tuple(wanted) and len(wanted) == 40
    assert len(said) == 1 and f"and are cut ({how}): the first is line 5 of {file} with 53" in said[0]
    assert len(prompts.group(5).prompt) == 9


def test_the_first_is_refused_by_its_line(file, tokenizer):
    with pytest.raises(UserError, match=r"prompt of line 5 of .*d.jsonl has 53 tokens, more than the 40.*leave_out"):
        stream(file, tokenizer, overlong_prompts="error")


class Made:
    """Samples that are made when they are asked for; every third is too long."""

    name = "made"
    reward = None

    def sample(self, index):
        return Sample(index, "7" * (99 if index % 3 == 2 else 5), {"index": index})


def test_of_a_task_that_makes_them_the_next_takes_their_place(tokenizer):
    said = []
    prompts = stream("made", tokenizer, said, task=Made())
    assert [prompts.group(i).sample.columns["index"] for i in range(6)] == [0, 1, 3, 3, 4, 6]
    assert len(said) == 1 and "and is left out, as others like it will be: sample 2 with 99" in said[0]
    assert prompts.limit.count == 2

    class Hopeless(Made):
        def sample(self, index):
            return super().sample(2)

    with pytest.raises(UserError, match=f"{MAX_SKIPPED:,} prompts of made in a row"):
        stream("made", tokenizer, task=Hopeless()).group(0)


@pytest.mark.parametrize("streaming", [False, True])
def test_of_folders_and_streams(file, tokenizer, streaming, monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    file.rename(tmp_path / "set" / "train.jsonl")
    said = []
    prompts = stream(tmp_path / "set", tokenizer, said, streaming=str(streaming).lower(), shuffle="false")
    got = [prompts.group(i).sample.prompt[0]["content"][:2] for i in range(20)]
    assert got == [f"{i:02}" for i in range(12) if i not in LONG] * 2
    if streaming:  # as they come, since nobody knows what is to come
        assert prompts.limit.count == 4
    assert len(said) == 1 and "row 4 (counted from 0) of" in said[0]


def test_rows_that_certainly_fit_are_not_tokenized(file, tokenizer, monkeypatch):
    asked = []
    encode = tokenizer.encode_prompt
    monkeypatch.setattr(tokenizer, "encode_prompt", lambda prompt, where: asked.append(where) or encode(prompt, where))
    config = load_config(None, [f"task.name={file}", "model.path=x"])
    task = make_task(TaskConfig(name=str(file)), 0, "chat")
    PromptStream(task, tokenizer, SamplingParams(), config, 10_000)
    assert len(asked) == 1
