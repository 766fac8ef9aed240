"""`paceline report RUN`: the run as one HTML page without scripts and without anything to load.

Every number that is a step's metric, or made from metrics, names it (`data-metric`), so that a test can compare it
with `metrics.jsonl`."""

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
from paceline.observe.signal import find_causes
from paceline.observe.timeline import Span
from paceline.report import figures, lanes
from paceline.report.css import REPORT_CSS
from paceline.report.evaluations import evaluation_section
from paceline.report.lost_workers import WorkerLoss, describe_losses, find_losses
from paceline.report.rundata import RunData, read_run
from paceline.report.samples import samples_section
from paceline.report.savings import Savings, measure_savings
from paceline.report.savings_text import duration, full_answer, short_answer
from paceline.report.svg import for_both, number
from paceline.report.wall_clock import describe_wall_clock

MAX_LANE_FIGURES = 120  # steps whose lanes are drawn; of a longer run, every nth


def write_report(folder: Path, out: Path | None = None) -> tuple[Path, Savings]:
    """The page of a run -> its path, and what speculation saved."""
    run = read_run(folder)
    if not run.metrics:
        raise UserError(f"{folder} has no finished step yet, so there is nothing to report")
    savings = measure_savings(run)
    file = out or folder / "report.html"
    write_aside(file, page(run, savings))  # somebody may be looking at the one before
    return file, savings


def page(run: RunData, savings: Savings) -> str:
    name = html.escape(run.folder.resolve().name)
    body = [f"<h1>{name}</h1>", _state(run)]
    settings = _changes(run) + _settings(run)
    if run.metrics:
        speed = "".join([_worth(savings), _lanes(run), *_speed_charts(run, savings)])
        learning = "".join([*_learning_charts(run), evaluation_section(run), samples_section(run)])
        body += [_verdict(run, savings), _headline(run), _signal(run)]
        body.append(_tabs({"Speed": speed, "Learning": learning, "Settings": settings}))
    else:
        body.append(settings)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{name} · Paceline</title><style>{REPORT_CSS}</style></head>\n'
        f"<body>\n{''.join(body)}</body></html>\n"
    )


def _state(run: RunData) -> str:
    task = run.settings.get("task.name", "?")
    model = run.settings.get("model.path", "?")
    what = f"<code>{html.escape(str(model))}</code> on <code>{html.escape(str(task))}</code>"
    last = run.metrics[-1]["step"] if run.metrics else 0
    if run.done:
        state = f"finished, {last} {'step' if last == 1 else 'steps'}"
    elif run.metrics:
        state = f"step {last} of {run.steps}; the run goes on, or was stopped"
    else:
        state = "no step is finished yet; make the report again when one is"
    return f'<p class="note" id="state">{what} · {state}</p>'


def _verdict(run: RunData, s: Savings) -> str:
    """In wall-clock time, as `paceline compare` measures it."""
    words = describe_wall_clock(run, s)
    return f'<p class="answer" id="verdict">{html.escape(words)}</p>' if words else ""


def _headline(run: RunData) -> str:
    first = run.metrics[0]
    last = run.metrics[-1]
    reward = "critic/rewards/mean"
    seconds = _over(run.metrics, "timing_s/step", median, "median")
    tiles = [
        _tile(_value("step", float(last["step"]), "last"), f"of {run.steps} steps, {seconds} s each"),
        _tile(f"{_at(first, reward)} → {_at(last, reward)}", "mean reward, first → last step"),
        _tile(_over(run.metrics, "rollout/tok_s", median, "median"), "tokens/s in rollout (median)"),
    ]
    if run.speculating:
        accept = _over(run.speculating, "rollout/spec_accept_length", median, "median")
        rounds = run.total("rollout/rounds")
        speculative = run.total("rollout/spec_rounds") / rounds if rounds else 0.0
        share = _value("rollout/spec_rounds", speculative, "share", form=".0%")
        tiles += [_tile(accept, "accept length while speculating (median)"), _tile(share, "of rounds were speculative")]
    else:
        tiles.append(_tile("none", "of the rounds was speculative"))
    return f'<div class="tiles" id="headline">{"".join(tiles)}</div>'


def _worth(s: Savings) -> str:
    tiles = [
        _tile(_seconds("lost_s", s.lost_s), "lost to the tail"),
        _tile(_seconds("saved_s", s.saved_s) if s.compared_s else "–", "saved by speculation, about"),
        _tile(_seconds("training_s", s.training_s), "training the drafter"),
    ]
    if s.training_s:
        tiles.append(_tile(_seconds("training_idle_s", s.training_idle_s), "of it in idle time"))
        tiles.append(_tile(_seconds("cost_s", s.cost_s), "cost of training and merging"))
    details = "".join(f"<p>{_code(text)}</p>" for text in full_answer(s))
    return (
        f'<section id="worth"><h2>Was it worth it?</h2><p><b>{html.escape(short_answer(s))}</b></p>'
        f'<div class="tiles">{"".join(tiles)}</div>{details}</section>'
    )


def _lanes(run: RunData) -> str:
    steps = lanes.by_step(run)
    head = '<h2 id="lanes">Where the time went</h2>'
    if not steps:
        return head + '<p class="nothing">This run has no timeline.</p>'
    losses = find_losses(run)
    shown = _steps_to_show(steps, losses)
    others = [n for n in sorted(steps) if n not in shown]
    every = math.ceil(len(others) / MAX_LANE_FIGURES) if others else 1

    def figure(step: int) -> str:
        why = f", {' and '.join(shown[step])}" if step in shown else ""
        title = f"<h3>Step {step}{why}: {duration(_length(steps[step]))}</h3>"
        drawing = for_both(lambda: lanes.draw_lanes(steps[step], run.workers))
        return f'<figure id="fig-lanes-{step}">{title}{drawing}</figure>'

    parts = [head, *(f'<p class="loss">{text}</p>' for text in describe_losses(losses)), _legend(steps)]
    parts += [figure(step) for step in shown]
    caption = (
        "A lane per worker. Decoding is drawn as high as its batch, so that a long flat end is the tail. "
        "Point at anything to see its numbers; <code>timeline.json</code> opens in Perfetto."
    )
    if losses:
        caption += " What a lost worker did in its last step is not known."
    parts.append(f'<p class="note">{caption}</p>')
    if others:
        some = f" (one in {every})" if every > 1 else ""
        drawn = "".join(figure(step) for step in others[::every])
        parts.append(f"<details><summary>The other steps{some}</summary>{drawn}</details>")
    return "".join(parts)


def _steps_to_show(steps: dict[int, list[Span]], losses: list[WorkerLoss]) -> dict[int, list[str]]:
    """The steps whose lanes are not folded, each with the reasons."""
    slowest = max(steps, key=lambda n: _length(steps[n]))
    lossy = [(loss.step, "the first with a loss") for loss in losses[:1] if loss.step in steps]
    reasons: dict[int, list[str]] = {}
    for step, why in ((slowest, "the slowest"), (min(steps), "the first"), *lossy, (max(steps), "the last")):
        reasons.setdefault(step, []).append(why)
    return reasons


def _length(spans: list[Span]) -> float:
    """Seconds from the first start to the last end."""
    start, end = lanes.bounds(spans)
    return end - start


def _legend(steps: dict[int, list[Span]]) -> str:
    entries = lanes.kinds(span for spans in steps.values() for span in spans).items()
    items = (f'<li><i style="background:{colour}"></i>{html.escape(name)}</li>' for name, colour in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _tabs(tabs: dict[str, str]) -> str:
    """One of them is shown, the first at first; without scripts."""
    names = [(title.lower(), title) for title in tabs]
    buttons = "".join(
        f'<input type="radio" name="tab" id="tab-{name}"{" checked" if not i else ""}>'
        f'<label for="tab-{name}">{title}</label>'
        for i, (name, title) in enumerate(names)
    )
    bodies = "".join(f'<section class="tab" id="body-{name}">{tabs[title]}</section>' for name, title in names)
    return f'<div class="tabs">{buttons}{bodies}</div>'


def _learning_charts(run: RunData) -> list[str]:
    return [
        "<h2>Learning</h2>",
        _figure("fig-reward", lambda: figures.reward_curve(run), "Mean reward of each step's answers."),
        *_figures_if_any(
            {"fig-functions": (lambda: figures.function_curves(run), "Mean value of each reward function.")}
        ),
        _figure("fig-length", lambda: figures.length_curves(run), "Tokens per answer: mean, median, 99th percentile."),
        *_figures_if_any(
            {
                "fig-signal": (
                    lambda: figures.signal_curves(run),
                    "What there is to learn from: groups of unequal rewards; answers that ended at max_tokens; tokens "
                    "whose probability ratio was clipped.",
                ),
                "fig-turns": (lambda: figures.turn_curves(run), "Turns of each answer: mean and most."),
                "fig-tools": (
                    lambda: figures.tool_curves(run),
                    "Calls of tools in each step, and those of them, and steps of environments, that failed.",
                ),
            }
        ),
        *_update_figures(run),
    ]


def _speed_charts(run: RunData, s: Savings) -> list[str]:
    versions = any(row.get("drafter/published") for row in run.metrics)
    marks = " A dashed line is a new version of the drafter; the next step is the first with it." if versions else ""
    return [
        "<h2>Long answers</h2>",
        _figure("fig-histogram", lambda: figures.histogram(run), _tail_caption(run.lengths, s)),
        "<h2>Speculation</h2>",
        _figure(
            "fig-accept",
            lambda: figures.accept_curve(run),
            f"Accept length: tokens per sequence and verify pass, bonus token included; 1 is plain decoding.{marks}",
            "No round was speculative.",
        ),
        _figure(
            "fig-strategies",
            lambda: figures.strategy_bars(run),
            "The strategies that the tuner chose at each batch size, by their share of the decoding time.",
            "No rounds were recorded.",
        ),
    ]


def _update_figures(run: RunData) -> list[str]:
    """Of what the learner measured; a figure that would be empty is left out."""
    return _figures_if_any(
        {
            "fig-entropy": (
                lambda: figures.entropy_curve(run),
                "Entropy of the policy at the tokens that it was trained on.",
            ),
            "fig-kl": (lambda: figures.kl_curve(run), "KL divergence to the first policy (the k3 estimate)."),
            "fig-gradient": (lambda: figures.gradient_curve(run), "Norm of the gradient before it was clipped."),
        }
    )


def _figures_if_any(drawn: dict[str, tuple[Callable[[], str], str]]) -> list[str]:
    return [_figure(name, draw, caption) for name, (draw, caption) in drawn.items() if draw()]


def _signal(run: RunData) -> str:
    """Why nothing may be learned, if that is so."""
    causes = find_causes(run.settings, run.metrics)
    lines = (f'<p class="loss">{one.heading}, since step {one.step}: {html.escape(one.sentence)}</p>' for one in causes)
    return f'<div id="signal">{"".join(lines)}</div>' if causes else ""


def _changes(run: RunData) -> str:
    """Settings that were changed when the run was resumed."""
    rows = [
        f"<li><code>{html.escape(key)}</code> {_json(before)} → {_json(after)} after step {step}</li>"
        for step, changed in run.changes
        for key, (before, after) in changed.items()
    ]
    return f'<h2>Changed on resuming</h2><ul id="changes">{"".join(rows)}</ul>' if rows else ""


def _tail_caption(lengths: list[int], s: Savings) -> str:
    if not lengths:
        return "The run has no answers.jsonl."
    busy = s.rollout_s * s.workers
    time = f" Decoding fewer than a quarter of the batch took {s.tail_s / busy:.0%} of rollout." if busy else ""
    share = figures.tail_token_share(lengths)
    return f"{len(lengths):,} answers. The longest tenth has {share:.0%} of all tokens.{time}"


def _figure(name: str, draw: Callable[[], str], caption: str, nothing: str = "There is nothing to draw.") -> str:
    inside = for_both(draw) or f'<p class="nothing">{nothing}</p>'
    return f'<figure id="{name}">{inside}<figcaption>{html.escape(caption)}</figcaption></figure>'


def _settings(run: RunData) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(key)}</code></td><td>{_json(value)}</td><td>{_json(default)}</td></tr>"
        for key, (value, default) in run.changed_settings().items()
    )
    head = "<tr><th>setting</th><th>here</th><th>default</th></tr>"
    return f'<h2>Settings that differ from the defaults</h2><table id="settings">{head}{rows}</table>'


def _tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{value}</b><span>{label}</span></div>'


def _value(metric: str, value: float, how: str, step: int | None = None, form: str = "") -> str:
    """A number with its source: a metric at a step, or over all of them."""
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
    return f'<span data-savings="{name}" data-value="{seconds:.6f}">{shown}</span>'


def _code(text: str) -> str:
    """Text between `backticks` becomes code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _json(value: Any) -> str:
    return html.escape("–" if value is None else json.dumps(value, ensure_ascii=False).strip('"'))
