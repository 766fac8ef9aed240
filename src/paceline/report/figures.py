"""The figures of the report, each a function from a run to SVG; an empty string where there is nothing to draw."""

from __future__ import annotations

import json
import math
from collections import defaultdict

from paceline.observe.strategy_totals import StrategyTotals, bucket_below, read_totals
from paceline.report.picture import strategy_colours
from paceline.report.rundata import RunData
from paceline.report.svg import (
    LETTER_WIDTH,
    PALETTE,
    Frame,
    axes,
    axis_range,
    begins,
    dot,
    fewer,
    legend,
    lines,
    number,
    picture_width,
    rect,
    rule,
    svg,
    text,
    ticks,
)

FIGURE_LEFT = 60
FIGURE_TOP = 34
MAX_VISIBLE_DOTS = 80  # steps; with more, dots are transparent and only carry their tooltips
HISTOGRAM_BARS = 40
LABEL_SPACING = 30  # picture points that a label of a few letters needs
TAIL_COLOUR = "#d0672b"


def reward_curve(run: RunData) -> str:
    return _curves(run, {"critic/rewards/mean": "mean reward"}, "reward", from_zero=False)


def function_curves(run: RunData) -> str:
    """Each reward function, unweighted, where there are several."""
    found = {name for row in run.metrics for name in row if name.startswith("reward/") and name != "reward/errors"}
    names = {name: name.removeprefix("reward/") for name in sorted(found)}
    return _curves(run, names, "reward, unweighted", from_zero=False) if len(names) > 1 else ""


def length_curves(run: RunData) -> str:
    names = {"response_length/mean": "mean", "response_length/p50": "median", "response_length/p99": "99th percentile"}
    return _curves(run, names, "tokens per answer")


def signal_curves(run: RunData) -> str:
    names = {"groups/mixed": "groups of unequal rewards", "response_length/clip_ratio": "answers cut at max_tokens"}
    if any(run.values("actor/pg_clipfrac")):
        names["actor/pg_clipfrac"] = "tokens clipped"
    return _curves(run, names, "share")


def turn_curves(run: RunData) -> str:
    """Where completions have turns."""
    return _curves(run, {"acting/turns/mean": "mean", "acting/turns/max": "most"}, "turns per answer")


def tool_curves(run: RunData) -> str:
    """Where a tool was called."""
    if not any(run.values("acting/tool_calls")) and not any(run.values("acting/tool_errors")):
        return ""
    return _curves(run, {"acting/tool_calls": "calls", "acting/tool_errors": "errors"}, "calls of tools")


def entropy_curve(run: RunData) -> str:
    return _curves(run, {"actor/entropy": "entropy"}, "nats per token")


def kl_curve(run: RunData) -> str:
    return _curves(run, {"actor/kl_loss": "KL divergence"}, "nats per token")


def gradient_curve(run: RunData) -> str:
    return _curves(run, {"actor/grad_norm": "gradient norm"}, "before clipping")


def accept_curve(run: RunData) -> str:
    """Steps with speculative rounds have a value. A dashed line is a new version of the drafter: between the step that
    published it and the first one that used it."""
    name = "rollout/spec_accept_length"
    rows = run.speculating
    if not rows:
        return ""
    frame = _frame(run, [row.get(name, math.nan) for row in rows], from_zero=False, top=FIGURE_TOP + 14)
    title = text(FIGURE_LEFT, 20, f"accept length in tokens{begins(frame.y0, frame.y1)}", faint=True)
    return _curves(run, {name: "accept length"}, "", frame=frame, rows=rows, extra=title + _versions(run, frame))


def _versions(run: RunData, frame: Frame) -> str:
    """A line for each version of the drafter that was published, labelled where there is space."""
    marks = []
    labelled = -math.inf
    for row in run.metrics:
        if row.get("drafter/published"):
            x = frame.x(min(row["step"] + 0.5, frame.x1))
            marks.append(rule(x, frame.top, x, frame.bottom, 0.45, dash="4 3"))
            if x - labelled > LABEL_SPACING:
                version = f"v{row.get('drafter/version', math.nan):g}"
                marks.append(text(x, frame.top - 4, version, anchor="middle", faint=True))
                labelled = x
    return "".join(marks)


def _frame(run: RunData, values: list[float], from_zero: bool, top: float = FIGURE_TOP) -> Frame:
    steps = [row["step"] for row in run.metrics]
    low, high = axis_range(values, from_zero)
    margin = 0.5 if len(steps) == 1 else 0.0
    return Frame(
        FIGURE_LEFT, top, picture_width() - FIGURE_LEFT - 24, 180, steps[0] - margin, steps[-1] + margin, low, high
    )


def _curves(
    run: RunData,
    names: dict[str, str],
    unit: str,
    from_zero: bool = True,
    frame: Frame | None = None,
    rows: list[dict[str, float]] | None = None,
    extra: str = "",
) -> str:
    rows = run.metrics if rows is None else rows
    values = [row.get(name, math.nan) for row in rows for name in names]
    if not any(math.isfinite(v) for v in values):
        return ""
    frame = frame or _frame(run, values, from_zero)
    steps = [s for s in ticks(frame.x0, frame.x1, fewer(12), whole=True) if s == round(s)]
    parts = [
        axes(frame, "step", steps, ticks(frame.y0, frame.y1, 5), unit + (begins(frame.y0, frame.y1) if unit else "")),
        extra,
    ]
    for colour, (name, label) in zip(PALETTE[1:], names.items(), strict=False):
        parts.append(_curve(frame, rows, name, label, colour))
    entries = {label: colour for colour, label in zip(PALETTE[1:], names.values(), strict=False)}
    height = frame.bottom + 46
    if len(entries) > 1:
        names_below, end = legend(entries, FIGURE_LEFT, height + 10, picture_width() - 24)
        parts.append(names_below)
        height = end + 14
    return svg(picture_width(), height, "".join(parts), f"{', '.join(names.values())} over steps")


def _curve(frame: Frame, rows: list[dict[str, float]], name: str, label: str, colour: str) -> str:
    """One metric over steps, broken where it is not finite."""
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
        hidden = ' fill-opacity="0"' if len(rows) > MAX_VISIBLE_DOTS else ""
        dots.append(dot(x, y, colour, 3, f"step {row['step']}: {label} {number(value)}", data + hidden))
    return "".join([lines(points, colour), *dots])


def histogram(run: RunData) -> str:
    """Answers of the run by length, with the longest tenth in another colour."""
    lengths = run.lengths
    if not lengths:
        return ""
    longest = longest_tenth(lengths)
    width = max(1, math.ceil(max(lengths) / HISTOGRAM_BARS))  # tokens per bar
    count = max(lengths) // width + 1
    total = [0] * count
    tail = [0] * count
    for n in lengths:
        total[n // width] += 1
    for n in longest:
        tail[n // width] += 1
    frame = Frame(
        FIGURE_LEFT, FIGURE_TOP, picture_width() - FIGURE_LEFT - 24, 180, 0.0, count * width, 0.0, max(total) * 1.05
    )
    y_ticks = ticks(0, max(total), 5, whole=True)
    parts = [axes(frame, "tokens per answer", ticks(0, frame.x1, fewer(10), whole=True), y_ticks, "answers")]
    for i in range(count):
        parts.append(_histogram_bar(frame, i * width, width, total[i], tail[i]))
    edge = frame.x(longest[0])
    parts.append(rule(edge, frame.top - 6, edge, frame.bottom, 0.7, dash="4 3"))
    anchor, shift = ("end", -6) if edge > frame.left + frame.width * 0.6 else ("start", 6)
    label = f"longest tenth: from {number(longest[0])} on"
    parts.append(text(edge + shift, frame.top + 4, label, anchor=anchor))
    return svg(picture_width(), frame.bottom + 46, "".join(parts), "histogram of answer lengths")


def _histogram_bar(frame: Frame, start: int, width: int, total: int, tail: int) -> str:
    """Answers of `start` to `start + width - 1` tokens; those of the longest tenth on top."""
    title = f"{total:,} answers of {start} to {start + width - 1} tokens"
    x = frame.x(start) + 0.5
    wide = frame.x(start + width) - frame.x(start) - 1
    middle = frame.y(total - tail)
    top = frame.y(total)
    parts = []
    if total > tail:
        parts.append(rect(x, middle, wide, frame.bottom - middle, PALETTE[1], title))
    if tail:
        parts.append(rect(x, top, wide, middle - top, TAIL_COLOUR, title))
    return "".join(parts)


def longest_tenth(lengths: list[int]) -> list[int]:
    """Shortest first. Many answers may be as long as is allowed, so a length cannot tell who belongs to them."""
    return sorted(lengths)[-math.ceil(len(lengths) / 10) :]


def tail_token_share(lengths: list[int]) -> float:
    """Of all tokens, those in answers of the longest tenth."""
    return sum(longest_tenth(lengths)) / max(1, sum(lengths))


def strategy_bars(run: RunData) -> str:
    """For each bucket of batch sizes, the share of the decoding time that each strategy took."""
    by_bucket: dict[int, dict[str, list[StrategyTotals]]] = defaultdict(lambda: defaultdict(list))
    for totals in read_totals(run.spans):
        by_bucket[totals.bucket][totals.strategy].append(totals)
    if not by_bucket:
        return ""
    colours = strategy_colours({name for by in by_bucket.values() for name in by})
    frame = Frame(
        FIGURE_LEFT, FIGURE_TOP + 20, picture_width() - FIGURE_LEFT - 24, 220, 0.0, len(by_bucket), 0.0, 100.0
    )
    parts = [axes(frame, "batch size: sequences decoding together", [], [0, 25, 50, 75, 100])]
    parts.append(text(FIGURE_LEFT, 20, "% of decoding time; above: seconds", faint=True))
    for i, bucket in enumerate(sorted(by_bucket)):
        parts.append(_strategy_bar(frame, i, bucket, by_bucket[bucket], colours))
    names, end = legend(colours, FIGURE_LEFT, frame.bottom + 60, picture_width() - 24)
    return svg(picture_width(), end + 14, "".join(parts) + names, "share of decoding time by strategy and batch size")


def _strategy_bar(
    frame: Frame, i: int, bucket: int, by_strategy: dict[str, list[StrategyTotals]], colours: dict[str, str]
) -> str:
    """The `i`th bar, of one bucket of batch sizes."""
    width = frame.x(1) - frame.x(0)
    sizes = _sizes(bucket)
    whole = sum(t.seconds for totals in by_strategy.values() for t in totals)
    bottom = 0.0
    parts = []
    for name in colours:
        totals = by_strategy.get(name, [])
        seconds = sum(t.seconds for t in totals)
        if not seconds:
            continue
        share = 100 * seconds / whole
        rate = sum(t.tokens for t in totals) / seconds
        rounds = sum(t.rounds for t in totals)
        title = f"{name} at {sizes}: {share:.0f} % of {whole:.2f} s, {rounds:,} rounds, {rate:,.0f} tokens/s"
        y = frame.y(bottom + share)
        data = f' data-strategy="{name}" data-bucket="{bucket}" data-seconds="{seconds:.6f}"'
        parts.append(rect(frame.x(i) + width * 0.1, y, width * 0.8, frame.y(bottom) - y, colours[name], title, data))
        bottom += share
    middle = frame.x(i + 0.5)
    needed = LETTER_WIDTH * len(sizes)
    if width > needed or (i % 2 == 0 and 2 * width > needed):
        parts.append(text(middle, frame.bottom + 18, sizes, anchor="middle", faint=True))
    took = f"{number(whole)} s"
    if width > LETTER_WIDTH * len(took):
        parts.append(text(middle, frame.top - 6, took, anchor="middle", faint=True))
    return "".join(parts)


def _sizes(bucket: int) -> str:
    """The batch sizes of a bucket: "5–6"."""
    first = bucket_below(bucket) + 1
    return str(bucket) if first == bucket else f"{first}–{bucket}"
