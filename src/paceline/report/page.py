"""`paceline report RUN`: the run as one page that needs nothing else, no network and no script.

Every number that is a step's metric, or made from them, names it (`data-metric`), so that a test can hold it against
`metrics.jsonl`."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from paceline.errors import UserError
from paceline.files.writing import write_aside
from paceline.report import figures, lanes
from paceline.report.lost_workers import describe_losses, find_losses
from paceline.report.rundata import RunData, read_run
from paceline.report.svg import number
from paceline.report.worth import Worth, duration, measure, sentences, verdict

MOST_LANES = 120  # steps whose lanes are drawn; of a longer run, every so manieth
STYLE = """
:root { color-scheme: light dark; --ink: #1f2430; --paper: #ffffff; --soft: #f3f5f8; --line: #dfe3ea; --note: #5d6678; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ee; --paper: #15181e; --soft: #1e232b; --line: #343b47; --note: #9aa3b2; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 940px; padding: 24px 20px 60px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 8px; }
p { margin: 6px 0; } .note, figcaption { color: var(--note); font-size: 13.5px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 18px 0; }
.tile { background: var(--soft); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.tile b { display: block; font-size: 17px; font-weight: 600; white-space: nowrap; }
.tile span { color: var(--note); font-size: 13px; }
.tile b span { color: inherit; font-size: inherit; }
.verdict { font-size: 17px; font-weight: 600; }
figure { margin: 12px 0 20px; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 600px; height: auto; }
figcaption { margin-top: 4px; } .nothing { color: var(--note); font-style: italic; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 8px 0; list-style: none; font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 6px; vertical-align: -1px; }
h3 { font-size: 14px; margin: 16px 0 0; } summary { cursor: pointer; margin-top: 12px; }
table { border-collapse: collapse; font-size: 13.5px; } td, th { text-align: left; padding: 3px 18px 3px 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; vertical-align: top; }
code { font-family: ui-monospace, monospace; font-size: 0.93em; }
"""


def write_report(folder: Path, out: Path | None = None) -> tuple[Path, Worth]:
    """The page of a run -> where it is, and what it says about whether speculation was worth it."""
    run = read_run(folder)
    if not run.metrics:
        raise UserError(f"{folder} has no finished step yet, so there is nothing to report")
    worth = measure(run)
    file = out or folder / "report.html"
    write_aside(file, page(run, worth))  # somebody may be looking at the one before
    return file, worth


def page(run: RunData, worth: Worth) -> str:
    name = html.escape(run.folder.resolve().name)
    body = [f"<h1>{name}</h1>", _state(run)]
    if run.metrics:
        body += [_headline(run), _worth(worth), _lanes(run), *_charts(run, worth)]
    body.append(_settings(run))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{name} · Paceline</title><style>{STYLE}</style></head>\n'
        f"<body>\n{''.join(body)}</body></html>\n"
    )


def _state(run: RunData) -> str:
    task, model = run.settings.get("task.name", "?"), run.settings.get("model.path", "?")
    what = f"<code>{html.escape(str(model))}</code> on <code>{html.escape(str(task))}</code>"
    last = run.metrics[-1]["step"] if run.metrics else 0
    if run.done:
        state = f"finished, {last} {'step' if last == 1 else 'steps'}"
    elif run.metrics:
        state = f"step {last} of {run.steps}; the run goes on, or was stopped"
    else:
        state = "no step is finished yet; make the report again when one is"
    return f'<p class="note" id="state">{what} · {state}</p>'


def _headline(run: RunData) -> str:
    first, last, reward = run.metrics[0], run.metrics[-1], "critic/rewards/mean"
    seconds = _over(run.metrics, "timing_s/step", median, "median")
    tiles = [
        _tile(_value("step", float(last["step"]), "last"), f"of {run.steps} steps, {seconds} s each"),
        _tile(f"{_at(first, reward)} → {_at(last, reward)}", "mean reward, first → last step"),
        _tile(_over(run.metrics, "rollout/tok_s", median, "median"), "tokens/s in rollout (median)"),
    ]
    guessed = [row for row in run.metrics if row.get("rollout/spec_rounds")]
    if guessed:
        accept = _over(guessed, "rollout/spec_accept_length", median, "median")
        rounds, all_rounds = run.total("rollout/spec_rounds"), run.total("rollout/rounds")
        share = _value("rollout/spec_rounds", rounds / all_rounds if all_rounds else 0.0, "share", form=".0%")
        tiles += [_tile(accept, "tokens per check (median)"), _tile(share, "of rounds guessed ahead")]
    else:
        tiles.append(_tile("none", "rounds guessed ahead"))
    return f'<div class="tiles" id="headline">{"".join(tiles)}</div>'


def _worth(w: Worth) -> str:
    tiles = [
        _tile(_seconds("lost_s", w.lost_s), "lost to the tail"),
        _tile(_seconds("won_s", w.won_s) if w.compared_s else "–", "won back, about"),
        _tile(_seconds("training_s", w.training_s), "training the drafter"),
    ]
    if w.training_s:
        tiles.append(_tile(_seconds("training_waiting_s", w.training_waiting_s), "of it while waiting anyway"))
        tiles.append(_tile(_seconds("cost_s", w.cost_s), "cost of training and merging"))
    said = "".join(f"<p>{_code(text)}</p>" for text in sentences(w))
    return (
        f'<section id="worth"><h2>Was it worth it?</h2><p class="verdict">{html.escape(verdict(w))}</p>'
        f'<div class="tiles">{"".join(tiles)}</div>{said}</section>'
    )


def _lanes(run: RunData) -> str:
    steps = lanes.by_step(run)
    head = '<h2 id="lanes">Where the time went</h2>'
    if not steps:
        return head + '<p class="nothing">This run has no timeline.</p>'
    seconds = {n: max(s.end for s in spans) - min(s.start for s in spans) for n, spans in steps.items()}
    slowest, first, last = max(seconds, key=lambda n: seconds[n]), min(steps), max(steps)
    shown: dict[int, list[str]] = {}
    losses = find_losses(run)
    struck = [(loss.step, "the first with a loss") for loss in losses[:1] if loss.step in steps]
    for step, why in ((slowest, "the slowest"), (first, "the first"), *struck, (last, "the last")):
        shown.setdefault(step, []).append(why)
    others = [n for n in sorted(steps) if n not in shown]
    every = math.ceil(len(others) / MOST_LANES) if others else 1

    def figure(step: int) -> str:
        why = f", {' and '.join(shown[step])}" if step in shown else ""
        title = f"<h3>Step {step}{why}: {duration(seconds[step])}</h3>"
        return f'<figure id="fig-lanes-{step}">{title}{lanes.draw_lanes(steps[step], run.workers)}</figure>'

    entries = "".join(
        f'<li><i style="background:{colour}"></i>{html.escape(name)}</li>'
        for name, colour in lanes.kinds(span for spans in steps.values() for span in spans).items()
    )
    said = [f'<p class="loss">{text}</p>' for text in describe_losses(losses)]
    parts = [head, *said, f'<ul class="legend">{entries}</ul>', *(figure(step) for step in shown)]
    caption = (
        "A lane per worker. Decoding is drawn as high as its batch, so that a long flat end is the tail. "
        "Point at anything to see its numbers; <code>timeline.json</code> opens in Perfetto."
    )
    if losses:
        caption += " What a lost worker did in its last step went with it."
    parts.append(f'<p class="note">{caption}</p>')
    if others:
        some = f" (one in {every})" if every > 1 else ""
        drawn = "".join(figure(step) for step in others[::every])
        parts.append(f"<details><summary>The other steps{some}</summary>{drawn}</details>")
    return "".join(parts)


def _charts(run: RunData, w: Worth) -> list[str]:
    lengths = run.lengths
    tail = "The run has no answers.jsonl."
    if lengths:
        busy = w.rollout_s * w.workers
        time = f" Decoding fewer than a quarter of the batch took {w.tail_s / busy:.0%} of rollout." if busy else ""
        share = figures.tail_token_share(lengths)
        tail = f"{len(lengths):,} answers. The longest tenth holds {share:.0%} of all tokens.{time}"
    versions = any(row.get("drafter/published") for row in run.metrics)
    marks = " A dashed line is a new version of the drafter; the next step is the first with it." if versions else ""
    return [
        "<h2>Learning</h2>",
        _figure("fig-reward", figures.reward_curve(run), "Mean reward of each step's answers."),
        _figure("fig-length", figures.length_curves(run), "How long answers are: mean, median, 99th percentile."),
        "<h2>Long answers</h2>",
        _figure("fig-histogram", figures.histogram(run), tail),
        "<h2>Guessing ahead</h2>",
        _figure(
            "fig-accept",
            figures.accept_curve(run),
            f"Tokens per check, the one that the policy writes itself included; 1 is plain decoding.{marks}",
            "No round guessed ahead.",
        ),
        _figure(
            "fig-strategies",
            figures.strategy_bars(run),
            "Which way of decoding the tuner chose at which batch size, by its share of the time.",
            "No rounds were recorded.",
        ),
    ]


def _figure(name: str, drawing: str, caption: str, nothing: str = "There is nothing to draw.") -> str:
    inside = drawing or f'<p class="nothing">{nothing}</p>'
    return f'<figure id="{name}">{inside}<figcaption>{html.escape(caption)}</figcaption></figure>'


def _settings(run: RunData) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(key)}</code></td><td>{_plain(value)}</td><td>{_plain(usual)}</td></tr>"
        for key, (value, usual) in run.changed_settings().items()
    )
    head = "<tr><th>setting</th><th>here</th><th>default</th></tr>"
    return f'<h2>Settings that differ from the defaults</h2><table id="settings">{head}{rows}</table>'


def _tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{value}</b><span>{label}</span></div>'


def _value(metric: str, value: float, how: str, step: int | None = None, form: str = "") -> str:
    """A number that says where it is from: a metric at a step, or over all of them."""
    at = f' data-step="{step}"' if step is not None else ""
    shown = f"{value:{form}}" if form and math.isfinite(value) else number(value)
    return f'<span data-metric="{metric}" data-how="{how}"{at} data-value="{json.dumps(value)}">{shown}</span>'


def _at(row: dict[str, Any], metric: str) -> str:
    return _value(metric, float(row.get(metric, math.nan)), "at", row["step"], ".3f")


def _over(rows: list[dict[str, Any]], metric: str, how: Callable[[list[float]], float], name: str) -> str:
    values = [float(row[metric]) for row in rows if math.isfinite(row.get(metric, math.nan))]
    return _value(metric, float(how(values)) if values else math.nan, name)


def _seconds(name: str, seconds: float) -> str:
    shown = duration(seconds) if seconds >= 0 else f"−{duration(-seconds)}"
    return f'<span data-worth="{name}" data-value="{seconds:.6f}">{shown}</span>'


def _code(text: str) -> str:
    """Between `backticks` stands what is typed."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _plain(value: Any) -> str:
    return html.escape("–" if value is None else json.dumps(value, ensure_ascii=False).strip('"'))
