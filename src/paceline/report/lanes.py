"""The spans of a step, as a lane per worker. Decoding is drawn as high as its batch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.observe.timeline import (
    AHEAD,
    DECODE_PLAIN,
    DECODE_SPECULATIVE,
    EVALUATE,
    IDLE,
    LOST,
    MERGE,
    PREFILL,
    REWARD,
    ROLLOUT,
    SAVE,
    TOOLS,
    TRAIN,
    UPDATE,
    Span,
)
from paceline.report.lost_workers import find_losses
from paceline.report.rundata import RunData
from paceline.report.svg import Frame, axes, fewer, picture_width, polygon, rect, svg, text, ticks

LANE_LEFT = 74
LANE_HEIGHT = 36
LANE_GAP = 8
SPAN_COLOURS = {
    PREFILL: "#2aa3a3",
    DECODE_PLAIN: "#8b95a7",
    DECODE_SPECULATIVE: "#3b7dc4",
    IDLE: "#d9b38c",
    AHEAD: "#7f6fc0",
    TOOLS: "#d9d28c",
    TRAIN: "#2f9e6e",
    MERGE: "#a3c585",
    REWARD: "#c08a1e",
    UPDATE: "#8a63d2",
    EVALUATE: "#6b7688",
    SAVE: "#b0524a",
    LOST: "currentColor",
}
OTHER_COLOUR = "#c2438f"
MIN_SPAN_WIDTH = 0.7  # picture points


def kinds(spans: Iterable[Span]) -> dict[str, str]:
    """Name and colour of the spans that occur, in the order of a step."""
    found = {span.name for span in spans} - {ROLLOUT}
    known = {name: colour for name, colour in SPAN_COLOURS.items() if name in found}
    return known | dict.fromkeys(sorted(found - SPAN_COLOURS.keys()), OTHER_COLOUR)


def by_step(run: RunData) -> dict[int, list[Span]]:
    """The spans that are drawn for each step. A worker may be lost for several steps: each shows its part of that."""
    out: dict[int, list[Span]] = {}
    for span in run.spans:
        if span.name not in (ROLLOUT, LOST):
            out.setdefault(span.step, []).append(span)
    lost = [(s.worker, s.start, s.end) for s in run.spans if s.name == LOST]
    for loss in find_losses(run):
        if loss.worker is not None and loss.back is None:  # from the end of its last span
            known = [s.end for s in run.spans if s.worker == loss.worker and s.step <= loss.step]
            first = min((s.start for s in out.get(loss.step, [])), default=0.0)
            lost.append((loss.worker, max([*known, first]), math.inf))
    for step, spans in out.items():
        begin, end = bounds(spans)
        for worker, since, until in lost:
            start = max(begin, since)
            stop = min(end, until)
            if start < stop:
                spans.append(Span(worker, LOST, start, stop - start, step, {}))
    return out


def bounds(spans: list[Span]) -> tuple[float, float]:
    """The first start and the last end."""
    return min(s.start for s in spans), max(s.end for s in spans)


def draw_lanes(spans: list[Span], workers: list[int]) -> str:
    """One step."""
    begin, end = bounds(spans)
    seconds = max(end - begin, 1e-6)
    height = len(workers) * (LANE_HEIGHT + LANE_GAP) - LANE_GAP
    frame = Frame(LANE_LEFT, 8, picture_width() - LANE_LEFT - 24, height, 0.0, seconds, 0.0, 1.0)
    parts = [axes(frame, "seconds", ticks(0, seconds, fewer(8)), [])]
    peak = max([1, *(max(s.args["batch"]) for s in spans if "batch" in s.args)])
    for i, worker in enumerate(workers):
        top = frame.top + i * (LANE_HEIGHT + LANE_GAP)
        parts.append(text(LANE_LEFT - 10, top + LANE_HEIGHT / 2 + 4, f"worker {worker}", anchor="end"))
        parts.append(rect(LANE_LEFT, top, frame.width, LANE_HEIGHT, "currentColor", more=' fill-opacity="0.05"'))
        for span in spans:
            if span.worker == worker:
                parts.append(_draw(span, frame, begin, top, peak))
    return svg(picture_width(), frame.bottom + 46, "".join(parts), "what each worker did in the step")


def _draw(span: Span, frame: Frame, begin: float, top: float, peak: int) -> str:
    left = frame.x(span.start - begin)
    right = max(frame.x(span.end - begin), left + MIN_SPAN_WIDTH)
    colour = SPAN_COLOURS.get(span.name, OTHER_COLOUR)
    title = _title(span, begin)
    if "batch" not in span.args:
        return rect(left, top, right - left, LANE_HEIGHT, colour, title)
    first, last = (LANE_HEIGHT * n / peak for n in span.args["batch"])
    bottom = top + LANE_HEIGHT
    background = rect(left, top, right - left, LANE_HEIGHT, colour, title, ' fill-opacity="0.25"')
    corners = [(left, bottom), (left, bottom - first), (right, bottom - last), (right, bottom)]
    return background + polygon(corners, colour, title)


def _title(span: Span, begin: float) -> str:
    words = [f"{span.name}: {span.seconds:.3f} s from {span.start - begin:.3f} s"]
    if "rounds" in span.args:
        words.append(f"{span.args['rounds']:,} rounds, {span.args.get('tokens', 0):,} tokens")
    if "batch" in span.args:
        words.append("batch {} to {}".format(*span.args["batch"]))
    return ", ".join(words)
