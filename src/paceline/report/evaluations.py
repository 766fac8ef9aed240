"""The evaluations of a run: a figure over its steps, and a table with what has changed since the first one."""

from __future__ import annotations

import html
import json
import math

from paceline.evaluation.paired import compare_scores, standard_error
from paceline.evaluation.records import EvalRecord
from paceline.evaluation.scores import GREEDY, MEAN
from paceline.report.rundata import RunData
from paceline.report.svg import (
    PALETTE,
    Frame,
    axes,
    axis_range,
    begins,
    dot,
    fewer,
    for_both,
    legend,
    lines,
    number,
    picture_width,
    rule,
    svg,
    ticks,
)

LEFT = 60
TOP = 34
HEIGHT = 180


def evaluation_section(run: RunData) -> str:
    """Nothing for a run that was not evaluated."""
    records = comparable(run.evaluations)
    if not records:
        return ""
    scores = records[0].scores
    data = ", ".join(html.escape(name) for name in scores.data)
    caption = (
        f"{len(scores.prompts):,} prompts of {data}, {scores.samples} sampled "
        f"{'answer' if scores.samples == 1 else 'answers'} each, always with the same noise. Bars are standard errors "
        "of a single evaluation; the table has those of the differences, which are smaller on equal dice."
    )
    drawing = for_both(lambda: evaluation_curves(records))
    figure = f'<figure id="fig-evaluation">{drawing}<figcaption>{caption}</figcaption></figure>'
    return f'<h2 id="evaluation">Evaluation</h2>{figure}{evaluation_table(records, run.best_step)}'


def comparable(records: list[EvalRecord]) -> list[EvalRecord]:
    """Those on the same prompts and dice as the last one: settings may have changed when the run was resumed."""
    return [r for r in records if r.fingerprint == records[-1].fingerprint]


def shown_numbers(record: EvalRecord) -> dict[str, str]:
    """Name -> label of what is drawn: mean reward, pass@k for the largest k, and the greedy answers."""
    k = record.scores.ks[-1]
    shown = {MEAN: "mean reward", f"pass@{k}": f"pass@{k}"}
    return shown | ({GREEDY: "greedy"} if record.scores.prompts[0].greedy is not None else {})


def evaluation_curves(records: list[EvalRecord]) -> str:
    names = shown_numbers(records[0])
    values = [r.scores.value(name) for r in records for name in names]
    errors = [standard_error(r.scores.per_prompt(MEAN)) for r in records]
    ends = [r.scores.value(MEAN) + sign * e for r, e in zip(records, errors, strict=True) for sign in (-1, 1)]
    low, high = axis_range([*values, *ends], from_zero=False)
    first, last = records[0].step, records[-1].step
    margin = 0.5 if first == last else 0.0
    frame = Frame(LEFT, TOP, picture_width() - LEFT - 24, HEIGHT, first - margin, last + margin, low, high)
    steps = [s for s in ticks(frame.x0, frame.x1, fewer(12), whole=True) if s == round(s)]
    parts = [axes(frame, "step", steps, ticks(low, high, 5), f"evaluation{begins(low, high)}")]
    for record, error in zip(records, errors, strict=True):
        if math.isfinite(error):
            x, mean = frame.x(record.step), record.scores.value(MEAN)
            parts.append(rule(x, frame.y(mean - error), x, frame.y(mean + error), 0.5))
    for colour, (name, label) in zip(PALETTE[1:], names.items(), strict=False):
        parts.append(_curve(frame, records, name, label, colour))
    entries = {label: colour for colour, label in zip(PALETTE[1:], names.values(), strict=False)}
    named, end = legend(entries, LEFT, frame.bottom + 56, picture_width() - 24)
    return svg(picture_width(), end + 14, "".join(parts) + named, "evaluation over steps")


def _curve(frame: Frame, records: list[EvalRecord], name: str, label: str, colour: str) -> str:
    points: list[tuple[float, float] | None] = []
    dots = []
    for record in records:
        value = record.scores.value(name)
        if not math.isfinite(value):
            points.append(None)
            continue
        x, y = frame.x(record.step), frame.y(value)
        points.append((x, y))
        data = f' data-eval="{name}" data-step="{record.step}" data-value="{json.dumps(value)}"'
        dots.append(dot(x, y, colour, 3, f"step {record.step}: {label} {number(value)}", data))
    return "".join([lines(points, colour), *dots])


def evaluation_table(records: list[EvalRecord], best: int | None) -> str:
    names = shown_numbers(records[0])
    titles = [*names.values(), f"mean reward since step {records[0].step}", "95 % interval", "unpaired"]
    rows = [f"<tr><th>step</th>{''.join(f'<th>{title}</th>' for title in titles)}</tr>"]
    for record in records:
        mark = " best" if record.step == best else ""
        cells = [f"{record.step}{mark}", *(number(record.scores.value(name)) for name in names)]
        cells += _difference(record, records[0])
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<div style="overflow-x:auto"><table id="evaluations">{"".join(rows)}</table></div>'


def _difference(record: EvalRecord, first: EvalRecord) -> list[str]:
    if record is first:
        return ["–", "–", "–"]
    d = compare_scores(record.scores, first.scores)
    if not math.isfinite(d.se):
        return [f"{d.difference:+.3f}", "–", "–"]
    return [f"{d.difference:+.3f} ± {d.se:.3f}", f"{d.low:+.3f} to {d.high:+.3f}", f"± {d.se_unpaired:.3f}"]
