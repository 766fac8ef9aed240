"""What the page says is what `metrics.jsonl` says; every state of a run makes a page; bad input is a sentence."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from rich.console import Console

from paceline.config import load_config
from paceline.observe.metrics import read_lines
from paceline.observe.strategy_totals import read_totals
from paceline.observe.summary import summary
from paceline.observe.timeline import LOST, ROLLOUT, TRAIN, UPDATE, read_timeline
from paceline.report.lanes import by_step
from paceline.report.lost_workers import WorkerLoss, describe_losses, find_losses
from paceline.report.page import page, write_report
from paceline.report.rundata import read_run
from paceline.report.savings import measure_savings
from paceline.report.savings_text import full_answer, short_answer

from ..test_cli import here
from .conftest import QUICK, made_run

CURVES = ("critic/rewards/mean", "response_length/mean", "response_length/p50", "response_length/p99")
FIGURES = ("fig-reward", "fig-length", "fig-histogram", "fig-accept", "fig-strategies")


class Page(HTMLParser):
    """Elements with their attributes and the text directly inside."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        said: list[str] = []
        self.found.append((tag, dict(attrs), said))
        if tag not in ("meta", "link"):
            self._open.append(said)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        if self._open:
            self._open[-1].append(data)

    def having(self, attribute: str) -> list[tuple[dict[str, str], str]]:
        return [(a, "".join(said)) for _, a, said in self.found if attribute in a]


def rows(run: Path) -> dict[int, dict]:
    return {row["step"]: row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def test_the_numbers_are_those_of_the_metrics(real_run):
    file, _ = write_report(real_run)
    shown, metrics = Page(file.read_text()), rows(real_run)
    seen = set()
    for attributes, text in shown.having("data-metric"):
        name, value = attributes["data-metric"], float(attributes["data-value"])
        counted = [row for row in metrics.values() if "spec_accept" not in name or row["rollout/spec_rounds"]]
        over = [row[name] for row in counted]
        if "data-step" in attributes:
            step = int(attributes["data-step"])
            assert value == metrics[step][name]
            seen.add((name, step))
        elif attributes["data-how"] == "share":
            rounds = sum(row["rollout/rounds"] for row in metrics.values())
            assert value == pytest.approx(sum(over) / rounds)
        else:
            assert value == pytest.approx({"median": median, "last": max}[attributes["data-how"]](over))
        if text.strip():
            said = text.replace(",", "")
            number = float(said.rstrip("%")) / (100 if said.endswith("%") else 1)
            assert number == pytest.approx(value, rel=0.006, abs=0.0051), (name, text)
    assert {(name, step) for name in CURVES for step in metrics} <= seen, "every point of every curve"
    assert {("rollout/spec_accept_length", s) for s, row in metrics.items() if row["rollout/spec_rounds"]} <= seen


def test_steps_without_speculation_do_not_count_as_drafts_that_were_rejected(tmp_path):
    """Neither on the page nor in the table at the end of a run."""
    folder = made_run(tmp_path / "run", steps=4)
    metrics = [row | {"critic/rewards/mean": 0.5} for row in rows(folder).values()]
    metrics[0] |= {"rollout/spec_rounds": 0.0, "rollout/spec_accept_length": 1.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    expected = median(row["rollout/spec_accept_length"] for row in metrics[1:])
    shown = Page(write_report(folder)[0].read_text()).having("data-how")
    assert [float(a["data-value"]) for a, _ in shown if "accept" in a["data-metric"]] == [pytest.approx(expected)]
    console = Console(file=io.StringIO(), width=200)
    console.print(summary(metrics))
    assert f"accept length {expected:.2f} (while speculating)" in console.file.getvalue()


def test_the_timeline_agrees_with_the_metrics(real_run):
    spans, metrics = read_timeline(real_run / "timeline.json"), rows(real_run)
    rounds = read_totals(spans)
    for step, row in metrics.items():
        mine = [t for t in rounds if t.step == step]
        assert sum(t.rounds for t in mine) == row["rollout/rounds"]
        assert sum(t.rounds for t in mine if t.strategy != "plain") == row["rollout/spec_rounds"]
        update = [s for s in spans if s.step == step and s.name == UPDATE]
        assert sum(s.seconds for s in update) == pytest.approx(row["timing_s/update_actor"], abs=1e-3)
        rollout = [s for s in spans if s.step == step and s.name == ROLLOUT]
        assert sum(s.seconds for s in rollout) == pytest.approx(row["timing_s/gen"], rel=0.1, abs=0.05)
    ordered = sorted((s for s in spans if s.name != ROLLOUT), key=lambda s: s.start)
    both = [(a, b) for a, b in itertools.pairwise(ordered) if a.end > b.start + 1e-3]
    assert not both, f"a worker does one thing: {both[:3]}"
    assert json.loads((real_run / "timeline.json").read_text()), "a finished run's timeline is whole JSON"


def test_the_answers_agree_with_the_metrics(real_run):
    answers = [json.loads(line) for line in (real_run / "answers.jsonl").read_text().splitlines()]
    for row, step in zip(answers, rows(real_run).values(), strict=True):
        assert row["step"] == step["step"] and row["workers"] == [0] * len(row["lengths"])
        assert np.mean(row["lengths"]) == pytest.approx(step["response_length/mean"])
        assert np.mean(row["rewards"]) == pytest.approx(step["critic/rewards/mean"])
    text = write_report(real_run)[0].read_text()
    histogram = text[text.index('id="fig-histogram"') : text.index('id="fig-accept"')]
    bars = re.findall(r"<title>([\d,]+) answers of (\d+) to", histogram)
    counts = {int(first): int(count.replace(",", "")) for count, first in bars}
    assert sum(counts.values()) == sum(len(row["lengths"]) for row in answers)


def test_strategies_take_all_the_decoding_time(real_run):
    shown = Page(write_report(real_run)[0].read_text()).having("data-strategy")
    rounds = read_totals(read_timeline(real_run / "timeline.json"))
    assert sum(float(a["data-seconds"]) for a, _ in shown) == pytest.approx(sum(t.seconds for t in rounds), rel=1e-4)
    assert {a["data-strategy"] for a, _ in shown} == {t.strategy for t in rounds}


def test_the_page_needs_nothing_else(real_run):
    text = write_report(real_run)[0].read_text()
    assert "<script" not in text and "@import" not in text and "url(" not in text
    outside = [a for _, a, _ in Page(text).found for k in ("src", "href") if k in a and not a[k].startswith("data:")]
    assert not outside
    assert all(f'<figure id="{name}"' in text for name in FIGURES) and "prefers-color-scheme: dark" in text


def test_time_lost_saved_and_paid(tmp_path):
    """Four workers decode for 1, 2, 3 and 4 seconds; three of them wait for 3, 2 and 1, and train for 75 % of that."""
    w = measure_savings(read_run(made_run(tmp_path / "run", steps=3)))
    assert w.workers == 4 and w.rollout_s == 12 and w.total_s == 18
    assert w.idle_s == pytest.approx(3 * 6.0, abs=1e-3) and w.training_s == pytest.approx(3 * 4.5, abs=1e-3)
    assert w.training_idle_s == pytest.approx(w.training_s, abs=1e-3) and w.cost_s == pytest.approx(0, abs=1e-3)
    tail = sum(max(1, 32 - i) * 4 < 32 for i in range(40)) / 40
    assert w.tail_s == pytest.approx(3 * 10.0 * tail, abs=1e-3)
    # A quarter of the rounds have no plain one near them: only batches 32 and 12 were decoded plainly.
    near = [i for i in range(40) if i not in (0, 20) and (max(1, 32 - i) > 24 or 6 < max(1, 32 - i) <= 16)]
    assert 0 < w.compared_s < w.speculative_s == pytest.approx(3 * 10.0 * 38 / 40, abs=1e-3)
    assert w.compared_s >= 3 * 10.0 * len(near) / 40
    # Rounds are equally long, so a plain one took as long as a speculative one, which has an accept length of 3. The
    # median is over workers that are unequally fast, so only the total says something.
    assert 0.5 * w.compared_s < w.saved_s < 2.5 * w.compared_s and w.net_s == pytest.approx(w.saved_s, abs=1e-3)
    said = " ".join(full_answer(w))
    assert short_answer(w).startswith("Yes, judging by only 24 plain rounds: about")
    assert "left out" in said and "idle anyway" in said and "paceline compare" in said


def test_training_when_nobody_decodes_is_a_cost(tmp_path):
    from paceline.observe.timeline import Timeline

    run = made_run(tmp_path / "run", steps=1, workers=2)
    timeline = Timeline(run / "timeline.json", 1)
    for worker in (0, 1):
        timeline.span(worker, "train drafter", timeline._zero + 10, 2.0, 1)
    w = measure_savings(read_run(run))
    assert w.cost_s == pytest.approx(4.0, abs=1e-3) and w.training_s == pytest.approx(5.5, abs=1e-3)


def test_who_waits_for_training_to_end_pays_too(tmp_path):
    """One worker trains for half a second after the last reward, then a version is made, and all four wait."""
    from paceline.observe.timeline import Timeline

    run = made_run(tmp_path / "run", steps=1)
    begun = min(s.start for s in read_timeline(run / "timeline.json"))
    timeline = Timeline(run / "timeline.json", 1)
    zero = timeline._zero
    timeline.span(2, "train drafter", zero + begun + 4.1, 0.6, 1)
    timeline.span(0, "merge drafter", zero + begun + 5.0, 0.25, 1)
    w = measure_savings(read_run(run))
    assert w.cost_s == pytest.approx(4 * 0.75, abs=1e-3) and w.training_idle_s == pytest.approx(4.5, abs=1e-3)
    assert "It cost 3.00 s of worker time" in " ".join(full_answer(w))


def test_a_worker_that_is_lost_and_comes_back(struck_run, capsys):
    run = read_run(struck_run)
    assert run.workers == [0, 1] and [row["cluster/lost"] for row in run.metrics] == [0, 1, 0, 0, 0]
    [loss] = find_losses(run)
    assert (loss.worker, loss.step) == (1, 2) and loss.back in (3, 4) and loss.seconds > 0.5
    text = write_report(struck_run)[0].read_text()
    said = f"Worker 1 was lost in step 2 and took part again in step {loss.back}, {loss.seconds:.1f} s later."
    assert said in text and ">lost</li>" in text and re.search("Step 2, .*the first with a loss", text)
    assert here("report", struck_run) == 0 and said in capsys.readouterr().out.replace("\n", " ")


def test_each_step_shows_its_part_of_a_loss(struck_run):
    run = read_run(struck_run)
    [loss] = find_losses(run)
    for step, spans in by_step(run).items():
        others = [s for s in spans if s.name != LOST]
        lost = [s for s in spans if s.name == LOST]
        assert [s.worker for s in lost] == ([1] if 2 <= step < loss.back else [])
        for span in lost:
            assert min(s.start for s in others) <= span.start and span.end <= max(s.end for s in others) + 1e-6
            assert not any(s.worker == 1 and s.start < span.end and span.start < s.end for s in others)
    took_part = {(s.step, s.worker) for s in run.spans if s.name == UPDATE}
    assert {step for step, worker in took_part if worker == 1} == {1, *range(loss.back, 6)}
    assert any(s.name == TRAIN for s in run.spans), "whoever runs dry trains"


def test_a_worker_that_is_lost_for_good(tmp_path):
    run = read_run(made_run(tmp_path / "run", steps=4, lost=2))
    assert find_losses(run) == [WorkerLoss(1, 2)]
    text = page(run, measure_savings(run))
    assert "Worker 1 was lost in step 2 and did not come back." in text and ">lost</li>" in text
    lost = {step: [s for s in spans if s.name == LOST] for step, spans in by_step(run).items()}
    assert [len(lost[step]) for step in (1, 2, 3, 4)] == [0, 1, 1, 1]
    first = read_run(made_run(tmp_path / "first", steps=2, workers=2, lost=1))
    assert find_losses(first) == [WorkerLoss(1, 1)] and first.workers == [0, 1], "of which there is no span at all"


def test_a_loss_without_a_timeline_and_many_losses(tmp_path):
    run = made_run(tmp_path / "run", steps=3, lost=2)
    (run / "timeline.json").unlink()
    assert describe_losses(find_losses(read_run(run))) == ["A worker was lost in step 2."]
    said = describe_losses([WorkerLoss(n % 3, n + 1, n + 2, 4.0) for n in range(8)] + [WorkerLoss(2, 9)])
    assert said == ["Workers were lost 9 times, first in step 1, last in step 9; 1 did not come back."]


def test_versions_of_the_drafter_are_drawn_behind_the_step_that_published_them(tmp_path):
    text = write_report(made_run(tmp_path / "run", steps=7))[0].read_text()
    figure = text[text.index('id="fig-accept"') : text.index('id="fig-strategies"')].partition('class="narrow"')[0]
    at = {name: float(x) for x, name in re.findall(r'<text x="([\d.]+)"[^>]*>(v\d+)<', figure)}
    dots = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', figure)]
    assert at.keys() == {"v1", "v2"} and figure.count("stroke-dasharray") == 2
    assert dots[2] < at["v1"] < dots[3] and dots[5] < at["v2"] < dots[6]


def test_the_longest_tenth_where_most_are_cut_short(tmp_path):
    run = made_run(tmp_path / "run", steps=1)
    lengths = [50] * 10 + [200] * 30
    row = {"step": 1, "lengths": lengths, "rewards": [0.0] * 40, "workers": [0] * 40}
    (run / "answers.jsonl").write_text(json.dumps(row) + "\n")
    text = write_report(run)[0].read_text()
    assert "longest tenth: from 200 on" in text
    assert f"The longest tenth has {4 * 200 / sum(lengths):.0%} of all tokens" in text


def test_a_run_without_speculation(tmp_path):
    run = read_run(made_run(tmp_path / "run", steps=3, workers=1, speculate=False))
    w = measure_savings(run)
    assert w.saved_s == 0 and "Speculation was not used" in short_answer(w)
    text = page(run, w)
    assert "No round was speculative." in text and "not trained" in text and "none" in text


def test_no_steps_one_step_and_a_run_in_progress(tmp_path):
    empty = made_run(tmp_path / "empty", steps=0, planned=9)
    text = page(run := read_run(empty), measure_savings(run))
    assert "no step is finished yet" in text and "rollout.samples" in text and "<figure" not in text
    one = write_report(made_run(tmp_path / "one", steps=1))[0].read_text()
    assert "finished, 1 step<" in one and "1 step took" in one and one.count("fig-lanes-") == 1
    half = made_run(tmp_path / "half", steps=4, planned=9)
    for name in ("metrics.jsonl", "answers.jsonl", "timeline.json"):  # caught while they were being written
        with open(half / name, "a") as out:
            out.write('{"step": 5, "crit')
    shown = write_report(half)[0].read_text()
    assert "step 4 of 9; the run goes on" in shown and 'id="fig-lanes-4"' in shown


def test_values_that_are_not_numbers(tmp_path):
    run = made_run(tmp_path / "run", steps=2)
    lines = (run / "metrics.jsonl").read_text()
    assert "NaN" in lines
    text = write_report(run)[0].read_text()
    assert "→ <span" in text and ">NaN</span>" in text, "the last step's reward is not a number, and it says so"
    (run / "metrics.jsonl").write_text(
        re.sub(r'"(critic|response|rollout|timing)([^"]*)": [\d.]+', r'"\1\2": NaN', lines)
    )
    assert "There is nothing to draw." in write_report(run)[0].read_text()


def test_a_run_from_before_there_was_a_timeline(tmp_path):
    run = made_run(tmp_path / "run", steps=2)
    (run / "timeline.json").unlink()
    (run / "answers.jsonl").unlink()
    text = write_report(run)[0].read_text()
    assert "This run has no timeline." in text and "fig-reward" in text


def test_a_run_with_metrics_of_before_they_were_renamed(tmp_path):
    """The page, the table at the end of a resumed run, and whoever else reads the file see one name for each."""
    run = made_run(tmp_path / "run", steps=3)
    old = {"timing_s/end": 0.25, "drafter/every": 2.0, "drafter/thrown_away": 1.0}
    lines = [json.dumps(row | old) + "\n" for row in rows(run).values()]
    resumed = rows(run)[3] | {"step": 4, "timing_s/end_rollout": 0.25}
    (run / "metrics.jsonl").write_text("".join(lines) + json.dumps(resumed) + "\n")
    assert 'id="fig-reward"' in write_report(run)[0].read_text()
    metrics = read_run(run).metrics
    assert [row["timing_s/end_rollout"] for row in metrics] == [0.25] * 4 and not old.keys() & metrics[0].keys()
    assert metrics[0]["drafter/train_interval"] == 2 and metrics[0]["drafter/skipped_steps"] == 1
    assert read_lines(run / "metrics.jsonl")[2].keys() == metrics[2].keys()
    console = Console(file=io.StringIO(), width=200)
    console.print(summary(metrics))
    assert "end_rollout 0.25" in console.file.getvalue()


def test_a_long_run_shows_some_of_its_steps(tmp_path):
    text = write_report(made_run(tmp_path / "run", steps=300, workers=1))[0].read_text()
    assert "The other steps (one in 3)" in text
    assert 90 < text.count('id="fig-lanes-') < 130 and len(text) < 3_000_000


BAD = {
    "no run": (lambda run: (run / "config.yaml").unlink(), "is not a run directory"),
    "settings that are not YAML": (lambda run: (run / "config.yaml").write_text("a: [b"), "is not valid YAML"),
    "settings that are none": (lambda run: (run / "config.yaml").write_text("- 1"), "must hold settings"),
    "no steps": (lambda run: (run / "metrics.jsonl").unlink(), "has no finished step yet"),
    "half a line": (lambda run: break_line(run, '{"step": 1, "cri'), "line 1 of"),
    "a line that is a list": (lambda run: break_line(run, "[1, 2]"), "has no step"),
    "a line with words": (lambda run: break_line(run, '{"step": 1, "a": "b"}'), "not a number"),
}


def break_line(run: Path, text: str) -> None:
    file = run / "metrics.jsonl"
    file.write_text("\n".join([text, *file.read_text().splitlines()[1:]]) + "\n")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case, tmp_path, capsys):
    run = made_run(tmp_path / "run", steps=2, workers=1)
    spoil, problem = BAD[case]
    spoil(run)
    assert here("report", run) == 2
    said = capsys.readouterr().err
    assert problem in said and said.startswith("paceline: ") and said.count("\n") == 1
    assert not (run / "report.html").exists()


def test_the_command_says_where_the_page_is(tmp_path, capsys):
    run = made_run(tmp_path / "run", steps=2, workers=1)
    assert here("report", run) == 0
    said = capsys.readouterr().out
    assert f"report: {run / 'report.html'}" in said and "Lost to the tail" in said and "paceline compare" in said
    assert here("report", run, "--out", tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").read_text() == (run / "report.html").read_text()
    assert here("report", run, "--out", tmp_path / "no" / "where.html") == 2


def test_a_resumed_run_has_every_step_once(tmp_path, capsys):
    run = tmp_path / "run"
    words = [*QUICK, "steps=3", "rollout.samples=2", "rollout.max_tokens=20", f"run_dir={run}"]
    assert here("train", *words) == 0
    assert (run / "report.html").exists() and str(run / "report.html") in re.sub(r"\s", "", capsys.readouterr().out)
    (run / "checkpoints" / "step-000003").rename(tmp_path / "lost")  # as if killed in the third step, after step 2
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("steps: 3", "steps: 4"))
    assert here("train", "--resume", run) == 0
    spans = read_timeline(run / "timeline.json")
    assert [s.step for s in spans if s.name == UPDATE] == [1, 2, 3, 4]
    assert [row["step"] for row in map(json.loads, (run / "answers.jsonl").read_text().splitlines())] == [1, 2, 3, 4]
    third = min(s.start for s in spans if s.step == 3)
    assert third >= max(s.end for s in spans if s.step == 2), "the clock goes on where it stopped"
    assert "finished, 4 steps" in (run / "report.html").read_text()


def test_settings_that_differ_are_listed(real_run):
    changed = read_run(real_run).changed_settings()
    config = load_config(None, QUICK)
    assert changed["rollout.prompts"] == (3, 16) and changed["steps"] == (4, 100)
    assert "run_dir" not in changed and "rollout.temperature" not in changed
    assert changed["learn.lr"][0] == config.learn.lr and math.isfinite(changed["learn.lr"][1])
