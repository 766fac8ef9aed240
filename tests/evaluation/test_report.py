"""Evaluations on the report page are those of evaluations.jsonl."""

from __future__ import annotations

import json

from paceline.evaluation.paired import compare_scores
from paceline.evaluation.records import EVALUATIONS, read_records
from paceline.evaluation.scores import EvalScores, PromptScores
from paceline.report.page import write_report

from ..observe.conftest import made_run
from ..observe.test_report import Page
from ..test_cli import here


def with_evaluations(folder, steps=(0, 4, 8), fingerprint="a"):
    for step in steps:
        rewards = [[float((i * 7 + j * 3 + step) % 5 > 2) for j in range(4)] for i in range(6)]
        prompts = [PromptScores("countdown", row, [10] * 4, 0, {}, greedy=row[0]) for row in rewards]
        row = {"step": step, "fingerprint": fingerprint, "seconds": 1.0, "tokens": 240, "ks": [1, 2, 4]}
        row |= {"pass_reward": 1.0, "prompts": [vars(p) for p in prompts]}
        with open(folder / EVALUATIONS, "a") as out:
            out.write(json.dumps(row) + "\n")


def test_the_page_has_what_the_file_has(tmp_path):
    run = made_run(tmp_path / "run", 8)
    assert 'id="evaluation"' not in write_report(run)[0].read_text(), "nothing to show"
    with_evaluations(run, steps=(0,), fingerprint="of other settings")
    with_evaluations(run)
    text = write_report(run)[0].read_text()
    shown = Page(text)
    records = [r for r in read_records(run) if r.fingerprint == "a"]
    dots = {(a["data-eval"], int(a["data-step"])): float(a["data-value"]) for a, _ in shown.having("data-eval")}
    names = ("mean", "pass@4", "greedy")
    assert dots == {(name, r.step): r.scores.value(name) for r in records for name in names}
    d = compare_scores(records[-1].scores, records[0].scores)
    assert f"{d.difference:+.3f} ± {d.se:.3f}" in text and f"{d.low:+.3f} to {d.high:+.3f}" in text
    assert isinstance(records[0].scores, EvalScores)


def test_a_damaged_row_is_named(tmp_path, capsys):
    run = made_run(tmp_path / "run", 8)
    with_evaluations(run)
    file = run / EVALUATIONS
    lines = file.read_text().splitlines()
    row = json.loads(lines[1])
    row["prompts"][2]["rewards"] = [1.0]
    file.write_text("\n".join([lines[0], json.dumps(row), lines[2]]) + "\n")
    assert here("report", run) == 2
    said = capsys.readouterr().err
    assert f"row 2 of {file} has prompts with another number of answers" in said and said.count("\n") == 1
    file.write_text(lines[0] + "\n" + lines[1].replace('"rewards": [', '"rewards": ["x", ', 1) + "\n")
    assert here("report", run) == 2
    assert f"row 2 of {file}" in capsys.readouterr().err
