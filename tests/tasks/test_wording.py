"""Prompts made of columns: templates, examples, system messages, columns under other names."""

from __future__ import annotations

import json

import pytest

from paceline.config import TaskConfig
from paceline.errors import UserError
from paceline.library.trainer import Trainer
from paceline.tasks import make_task
from paceline.tasks.tasks import reworded

ROWS = [{"question": f"{i} and {i}?", "answer": f"{i}+{i}\n#### {2 * i}", "extra": {"level": i}} for i in range(5)]


def task(tmp_path, rows=ROWS, style="chat", **settings):
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return make_task(TaskConfig(name=str(tmp_path / "d.jsonl"), shuffle=False, **settings), seed=0, style=style)


def user(text):
    return {"role": "user", "content": text}


def test_a_template_makes_a_message_or_text(tmp_path):
    template = r"Level {extra.level}: {question} Put it into \boxed{}, {{so}}."
    text = r"Level 3: 3 and 3? Put it into \boxed{}, {so}."
    assert task(tmp_path, template=template).sample(3).prompt == [user(text)]
    assert task(tmp_path, template=template, style="text").sample(3).prompt == text
    sample = task(tmp_path, template=template, style="text", system="Be brief.").sample(3)
    assert sample.prompt == [{"role": "system", "content": "Be brief."}, user(text)]
    assert sample.columns["answer"] == "3+3\n#### 6" and sample.origin.startswith("line 4")


def test_columns_get_other_names_for_rewards(tmp_path):
    data = task(tmp_path, prompt_column="question", columns={"ground_truth": "extra.level", "gold": "answer"})
    assert data.sample(2).columns == {
        "answer": "2+2\n#### 4", "extra": {"level": 2}, "ground_truth": 2, "gold": "2+2\n#### 4",
    }  # fmt: skip


def test_examples_are_put_first_and_not_trained_on(tmp_path):
    data = task(tmp_path, template="Q: {question}", few_shot=2, system="Sums.")
    prompts = [data.sample(i).prompt for i in range(4)]
    assert prompts[0] == [
        {"role": "system", "content": "Sums."},
        user("Q: 0 and 0?"),
        {"role": "assistant", "content": "0+0\n#### 0"},
        user("Q: 1 and 1?"),
        {"role": "assistant", "content": "1+1\n#### 2"},
        user("Q: 2 and 2?"),
    ]
    assert prompts[3] == prompts[0], "three rows are left"
    text = task(tmp_path, template="Q: {question}\nA:", few_shot=1, few_shot_answer="{extra.level}", style="text")
    assert text.sample(0).prompt == "Q: 0 and 0?\nA: 0\n\nQ: 1 and 1?\nA:"
    messages = [{"prompt": [{"role": "system", "content": "S"}, user(str(i))], "answer": i} for i in range(2)]
    assert task(tmp_path, messages, few_shot=1).sample(0).prompt == [
        {"role": "system", "content": "S"}, user("0"), {"role": "assistant", "content": "0"}, user("1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"template": "Solve it."}, "names no column in braces"),
        ({"template": "{qestion}"}, r"line 1 of .* has no 'qestion', which task.template asks for.*question"),
        ({"template": "{extra}"}, r"'extra' of line 1 .* is an object, not text"),
        ({"template": "{question}{extra.levl}"}, r"no 'extra.levl'"),
        ({"prompt_column": "question", "columns": {"gold": "gold"}}, r"no 'gold', which task.columns asks for"),
        ({"template": "{question}", "few_shot": 5}, "none is left to ask"),
        ({"template": "{question}", "few_shot": 7}, "task.few_shot = 7, but there are only 5 rows"),
        ({"template": "{question}", "few_shot": 1, "few_shot_answer": "{x}"}, "which task.few_shot_answer asks for"),
    ],
)
def test_what_does_not_work_names_setting_and_row(tmp_path, settings, problem):
    with pytest.raises(UserError, match=problem):
        task(tmp_path, **settings)


def test_a_row_in_the_middle_is_named(tmp_path):
    rows = [*ROWS[:3], {"question": None, "answer": "1"}]
    with pytest.raises(UserError, match=r"'question' of line 4 of .*, which task.template asks for, is null"):
        task(tmp_path, rows, template="{question}")


def test_rows_from_python_are_worded_for_the_model(tmp_path):
    trainer = Trainer("embedded", ROWS, "exact_match", settings={"task.template": "{question}", "task.shuffle": False})
    (given,) = [trainer._task]
    assert reworded(given, trainer.config.task, "chat").sample(0).prompt == [user("0 and 0?")]
    assert reworded(given, trainer.config.task, "text").sample(0).prompt == "0 and 0?"
