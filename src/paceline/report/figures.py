"""The figures of the report, each from a run to SVG; an empty text where there is nothing to draw."""

from __future__ import annotations

import json
import math
from collections import defaultdict

from paceline.observe.rounds import Tally, below, tallies
from paceline.report.picture import strategy_colours
from paceline.report.rundata import RunData
from paceline.report.svg import COLOURS, Frame, axes, dot, legend, lines, number, rect, room, rule, svg, text, ticks

WIDTH, LEFT, TOP = 860, 60, 34
MANY = 80  # steps beyond which points are not drawn, only felt
BARS = 40
PER_LABEL = 30  # picture points between labels that would run into each other
TAIL = "#d0672b"


def reward_curve(run: RunData) -> str:
    return _curves(run, {"critic/rewards/mean": "mean reward"}, "reward")


def length_curves(run: RunData) -> str:
    names = {"response_length/mean": "mean", "response_length/p50": "median", "response_length/p99": "99th percentile"}
    return _curves(run, names, "tokens per answer", from_zero=True)


def accept_curve(run: RunData) -> str:
    """Only steps with guesses have a value; where a new drafter came in, a line is drawn: behind the step that
    published it, before the first one that used it."""
    name = "rollout/spec_accept_length"
    guessed = [row for row in run.metrics if row.get("rollout/spec_rounds")]
    if not guessed:
        return ""
    frame = _frame(run, [row.get(name, math.nan) for row in guessed], from_zero=False, top=TOP + 14)
    marks, labelled = [text(LEFT, 20, "tokens per check", faint=True)], -math.inf
    for row in run.metrics:
        if row.get("drafter/published"):
            x = frame.x(min(row["step"] + 0.5, frame.x1))
            marks.append(rule(x, frame.top, x, frame.bottom, 0.45, dash="4 3"))
            if x - labelled > PER_LABEL:
                marks.append(
                    text(x, frame.top - 4, f"v{row.get('drafter/version', math.nan):g}", anchor="middle", faint=True)
                )
                labelled = x
    return _curves(run, {name: "tokens per check"}, "", frame=frame, rows=guessed, extra="".join(marks))


def _frame(run: RunData, values: list[float], from_zero: bool, top: float = TOP) -> Frame:
    steps = [row["step"] for row in run.metrics]
    low, high = room(values, from_zero)
    air = 0.5 if len(steps) == 1 else 0.0
    return Frame(LEFT, top, WIDTH - LEFT - 24, 180, steps[0] - air, steps[-1] + air, low, high)


def _curves(
    run: RunData,
    names: dict[str, str],
    unit: str,
    from_zero: bool = False,
    frame: Frame | None = None,
    rows: list[dict[str, float]] | None = None,
    extra: str = "",
) -> str:
    rows = run.metrics if rows is None else rows
    values = [row.get(name, math.nan) for row in rows for name in names]
    if not any(math.isfinite(v) for v in values):
        return ""
    frame = frame or _frame(run, values, from_zero)
    steps = [s for s in ticks(frame.x0, frame.x1, 12, whole=True) if s == round(s)]
    parts = [axes(frame, "step", steps, ticks(frame.y0, frame.y1, 5), unit), extra]
    for colour, (name, label) in zip(COLOURS[1:], names.items(), strict=False):
        points: list[tuple[float, float] | None] = []
        dots = []
        for row in rows:
            value = row.get(name, math.nan)
            if not math.isfinite(value):
                points.append(None)
                continue
            x, y = frame.x(row["step"]), frame.y(value)
            points.append((x, y))
            data = f' data-metric="{name}" data-step="{row["step"]}" data-value="{json.dumps(value)}"'
            faint = ' fill-opacity="0"' if len(rows) > MANY else ""
            dots.append(dot(x, y, colour, 3, f"step {row['step']}: {label} {number(value)}", data + faint))
        parts += [lines(points, colour), *dots]
    entries = {label: colour for colour, label in zip(COLOURS[1:], names.values(), strict=False)}
    height = frame.bottom + 46
    if len(entries) > 1:
        names_below, end = legend(entries, LEFT, height + 10, WIDTH - 24)
        parts.append(names_below)
        height = end + 14
    return svg(WIDTH, height, "".join(parts), f"{', '.join(names.values())} over steps")


def histogram(run: RunData) -> str:
    """How long the answers of the run are, with the longest tenth in another colour."""
    lengths = run.lengths
    if not lengths:
        return ""
    longest = longest_tenth(lengths)
    edge = longest[0]
    size = max(1, math.ceil(max(lengths) / BARS))
    count = max(lengths) // size + 1
    both, tail = [0] * count, [0] * count
    for n in lengths:
        both[n // size] += 1
    for n in longest:
        tail[n // size] += 1
    body = [b - t for b, t in zip(both, tail, strict=True)]
    most = max(both)
    frame = Frame(LEFT, TOP, WIDTH - LEFT - 24, 180, 0.0, count * size, 0.0, most * 1.05)
    x_ticks, y_ticks = ticks(0, frame.x1, 10, whole=True), ticks(0, most, 5, whole=True)
    parts = [axes(frame, "tokens per answer", x_ticks, y_ticks, "answers")]
    wide = frame.width / count
    for i, (low, high) in enumerate(zip(body, tail, strict=True)):
        title = f"{low + high:,} answers of {i * size} to {(i + 1) * size - 1} tokens"
        x, middle, top = frame.x(i * size) + 0.5, frame.y(low), frame.y(low + high)
        if low:
            parts.append(rect(x, middle, wide - 1, frame.bottom - middle, COLOURS[1], title))
        if high:
            parts.append(rect(x, top, wide - 1, middle - top, TAIL, title))
    at = frame.x(edge)
    parts.append(rule(at, frame.top - 6, at, frame.bottom, 0.7, dash="4 3"))
    anchor, shift = ("end", -6) if at > frame.left + frame.width * 0.6 else ("start", 6)
    parts.append(text(at + shift, frame.top + 4, f"the longest tenth: from {number(edge)} tokens on", anchor=anchor))
    return svg(WIDTH, frame.bottom + 46, "".join(parts), "histogram of answer lengths")


def longest_tenth(lengths: list[int]) -> list[int]:
    """Shortest first. Many answers may be as long as is allowed, so a length cannot tell who belongs to them."""
    return sorted(lengths)[-math.ceil(len(lengths) / 10) :]


def tail_token_share(lengths: list[int]) -> float:
    """Of all tokens, those in answers of the longest tenth."""
    return sum(longest_tenth(lengths)) / max(1, sum(lengths))


def strategy_bars(run: RunData) -> str:
    """By batch size, which share of the decoding time went to which strategy."""
    by_size: dict[int, dict[str, list[Tally]]] = defaultdict(lambda: defaultdict(list))
    for t in tallies(run.spans):
        by_size[t.size][t.strategy].append(t)
    if not by_size:
        return ""
    colours = strategy_colours({name for by in by_size.values() for name in by})
    frame = Frame(LEFT, TOP + 20, WIDTH - LEFT - 24, 220, 0.0, len(by_size), 0.0, 100.0)
    parts = [axes(frame, "texts decoding at the same time", [], [0, 25, 50, 75, 100])]
    parts.append(text(LEFT, 20, "% of decoding time; above each bar, its seconds", faint=True))
    wide = frame.width / len(by_size)
    for i, size in enumerate(sorted(by_size)):
        by = by_size[size]
        whole = sum(t.seconds for group in by.values() for t in group)
        bottom = 0.0
        for name in colours:
            group = by.get(name, [])
            seconds, tokens = sum(t.seconds for t in group), sum(t.tokens for t in group)
            if not seconds:
                continue
            share = 100 * seconds / whole
            title = (
                f"{name} at {_sizes(size)}: {share:.0f} % of {whole:.2f} s, "
                f"{sum(t.rounds for t in group):,} rounds, {tokens / seconds:,.0f} tokens/s"
            )
            y = frame.y(bottom + share)
            data = f' data-strategy="{name}" data-size="{size}" data-seconds="{seconds:.6f}"'
            parts.append(rect(frame.x(i) + wide * 0.1, y, wide * 0.8, frame.y(bottom) - y, colours[name], title, data))
            bottom += share
        middle = frame.x(i + 0.5)
        parts.append(text(middle, frame.bottom + 18, _sizes(size), anchor="middle", faint=True))
        if wide > PER_LABEL:
            parts.append(text(middle, frame.top - 6, f"{number(whole)} s", anchor="middle", faint=True))
    names, end = legend(colours, LEFT, frame.bottom + 60, WIDTH - 24)
    return svg(WIDTH, end + 14, "".join(parts) + names, "share of decoding time by strategy and batch size")


def _sizes(size: int) -> str:
    first = below(size) + 1
    return str(size) if first == size else f"{first}–{size}"
