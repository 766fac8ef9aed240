"""Data sets that somebody damaged: each is read, or refused in one sentence; nothing else, and nothing waits."""

from __future__ import annotations

import json
import os
import pickle
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config import TaskConfig, config_from
from paceline.errors import UserError
from paceline.model.tokenizer import load_tokenizer
from paceline.tasks import make_task
from paceline.tasks.datasets import DataSet
from tests.fuzz.mutate_files import VALUES, damage_bytes, damage_value, deadline, misplace, refused, replace, write_json

TRL = [{"prompt": f"Make {i} from 3 4 5.\n", "answer": str(i), "level": i / 2, "tags": ["a"]} for i in range(6)]
CHAT = [
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2"}], "n": i}
    for i in range(4)
]
PARTS = [
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1 + 2"}]}], "answer": None} for _ in range(3)
]
VERL = [
    {
        "data_source": "math",
        "prompt": [{"role": "user", "content": "7 * 7"}],
        "reward_model": {"style": "rule", "ground_truth": "49"},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(3)
]
FORMS = (TRL, CHAT, PARTS, VERL)
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ m['role'] + ' ' + m['content'] }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    found = load_tokenizer("embedded")
    found.hf.chat_template = TEMPLATE
    return found


def write_parquet(r: random.Random, file, rows) -> bool:
    """-> whether parquet can hold such rows"""
    try:
        pq.write_table(pa.Table.from_pylist(rows), file, compression=r.choice(("none", "snappy", "gzip")))
    except (pa.ArrowException, TypeError, ValueError, AttributeError, LookupError, OverflowError):
        file.unlink(missing_ok=True)
        return False
    return True


def write(r: random.Random, folder, rows):
    """The rows, damaged in their values or in the bytes of the file, or something else in its place."""
    suffix, how = r.choice((".jsonl", ".json", ".parquet")), r.random()
    if how < 0.6:
        for _ in range(r.choice((1, 1, 2))):
            rows = damage_value(r, rows)
    file = folder / f"data{suffix}"
    file.unlink(missing_ok=True)
    written = suffix == ".parquet" and write_parquet(r, file, rows)
    if suffix == ".parquet" and not written:
        file = folder / "data.jsonl"
    if not written and ((suffix == ".json" and r.random() < 0.5) or not isinstance(rows, list)):
        write_json(r, file, rows)
    elif not written:
        replace(file, b"\n".join(json.dumps(row).encode() for row in rows))
    if how >= 0.4:
        replace(file, damage_bytes(r, file.read_bytes()))
    if r.random() < 0.03:
        misplace(r, file, folder)
    return file


def trial(seed: int, folder, tokenizer) -> bool:
    """-> whether the data set was taken"""
    r = random.Random(seed)
    file = write(r, folder, r.choice(FORMS))
    system, column = r.choice((None, "Be brief.")), r.choice(("prompt", "prompt", "prompt", "answer"))
    taken = False
    with deadline(), refused():
        task = make_task(TaskConfig(name=str(file), system=system, prompt_column=column), seed=seed, style="chat")
        taken = True
        for index in range(len(task.rows)):
            sample = task.sample(index)
            assert sample.origin.endswith(str(file)) and sample.prompt
            assert pickle.loads(pickle.dumps(sample)).index == index  # it reaches a reward process
            with refused() as said:  # a template may have an opinion of its own
                tokens = tokenizer.encode_prompt(sample.prompt, sample.where)
                assert all(0 <= token < 104 for token in tokens)
            assert not said or str(file) in said[0]
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    return taken


def run(seeds: range, folder, tokenizer) -> None:
    taken = 0
    for seed in seeds:
        try:
            taken += trial(seed, folder, tokenizer)
        except BaseException as err:
            err.add_note(f"seed {seed}")
            raise
    assert 0.05 * len(seeds) < taken < 0.95 * len(seeds), "both kinds should occur"


def test_damaged_data_files(tmp_path, tokenizer):
    run(range(600), tmp_path, tokenizer)


@pytest.mark.soak
def test_many_damaged_data_files(tmp_path, tokenizer):
    run(range(10_000, 18_000), tmp_path, tokenizer)


def test_rows_from_python(tokenizer):
    """Whatever a caller puts into a list."""
    r = random.Random(5)
    odd = [
        *VALUES,
        object(),
        lambda: 1,
        {1: 2},
        {"prompt": object()},
        ("prompt",),
        b"prompt",
        "\ud800",
        {"prompt": "\ud800"},
    ]
    for _ in range(400):
        rows = [dict(row) for row in r.choice(FORMS)]
        rows[r.randrange(len(rows))] = (
            r.choice(odd) if r.random() < 0.3 else {"prompt": r.choice(odd), "x": r.choice(odd)}
        )
        with deadline(), refused() as said:
            data = DataSet("data", rows, sent=True)
            for index in range(len(rows)):
                pickle.dumps(data.sample(index))
        assert not said or "of data" in said[0]


HOSTILE = {
    "a number": (b'{"prompt": "a"}\n\n{"prompt": 7}', "line 3 of .*a number"),
    "true": (b'{"prompt": true}', "line 1 of .*a truth value"),
    "null": (b'{"prompt": null}', "line 1 of .*null"),
    "list of numbers": (b'{"prompt": [1, 2]}', "line 1 of .*message 1 is a number"),
    "no role": (b'{"prompt": [{"content": "x"}]}', "message 1 has no role"),
    "role is a number": (b'{"prompt": [{"role": 1, "content": "x"}]}', "a role that is not text"),
    "content is a number": (b'{"prompt": [{"role": "user", "content": 5}]}', "a content that is a number"),
    "picture": (b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "other parts than text"),
    "no column": (b'{"prompt": "a"}\n{"answer": "b"}', "line 2 of .*no column 'prompt'"),
    "not UTF-8": (b'{"prompt": "a"}\n{"prompt": "\xff"}', "line 2 of .*UTF-8"),
    "surrogate": (b'{"prompt": "\\ud800"}', "line 1 of .*surrogate"),
    "nesting": (b'{"prompt": "a", "x": ' + b"[" * 200 + b"]" * 200 + b"}", "line 1 of .*levels deep"),
    "deep nesting": (b'{"prompt": "a", "x": ' + b"[" * 10**6, "line 1 of .*(levels deep|not valid JSON)"),
    "NaN": (b'{"prompt": "a", "x": NaN}', "line 1 of .*NaN"),
    "digits": (b'{"prompt": "a", "x": ' + b"9" * 10**5 + b"}", "line 1 of .*not valid JSON"),
    "empty": (b"", "holds no samples"),
    "list": (b"[1]\n", "line 1 of .*not an object"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_the_line_is_named(tmp_path, what):
    data, message = HOSTILE[what]
    (tmp_path / "d.jsonl").write_bytes(data)
    with deadline(), pytest.raises(UserError, match=message):
        make_task(TaskConfig(name=str(tmp_path / "d.jsonl")), 0, "chat")


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "pipe.parquet")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    with open(tmp_path / "huge.jsonl", "wb") as file:
        file.truncate(2**40)  # holes: no such file fits, but it takes no room
    with pytest.raises(UserError, match="zero byte"):
        config_from({"task.name": "a\0b.jsonl"}, "these settings")
    for name in ("x" * 5000 + ".jsonl", "~nobody-of-that-name/d.jsonl"):
        with pytest.raises(UserError, match="cannot be looked up"):
            make_task(TaskConfig(name=name), 0, "chat")
    for file in sorted(tmp_path.iterdir()):
        with deadline(), pytest.raises(UserError, match=file.name):
            make_task(TaskConfig(name=str(file)), 0, "chat")


def test_texts_may_hold_separators_of_other_alphabets(tmp_path):
    """Lines end with a line feed, not wherever Unicode would allow a break."""
    rows = [{"prompt": "a\u2028b\x85c"}, {"prompt": "d"}]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    task = make_task(TaskConfig(name=str(tmp_path / "d.jsonl"), shuffle=False), 0, "chat")
    assert [task.sample(i).prompt for i in range(2)] == ["a\u2028b\x85c", "d"]
    assert task.sample(1).where == f"sample 1 (line 2 of {tmp_path / 'd.jsonl'})"


def test_parts_of_text_are_one_text(tokenizer):
    parts = [{"role": "user", "content": [{"type": "text", "text": "1 "}, {"type": "text", "text": "+ 2"}]}]
    assert tokenizer.encode_prompt(parts) == tokenizer.encode_prompt([{"role": "user", "content": "1 + 2"}])


def test_a_template_names_the_row_that_it_does_not_take(tokenizer):
    with pytest.raises(UserError, match=r"the prompt of line 7 of d\.jsonl: no such role"):
        tokenizer.encode_prompt([{"role": "tool", "content": "x"}], "line 7 of d.jsonl")
