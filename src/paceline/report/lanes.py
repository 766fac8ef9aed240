"""What every worker did in a step, as a lane per worker. Decoding is drawn as high as its batch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.observe.timeline import (
    IDLE,
    LOST,
    MERGE,
    PLAIN,
    PREFILL,
    REWARD,
    ROLLOUT,
    SAVE,
    SPECULATIVE,
    TRAIN,
    UPDATE,
    Span,
)
from paceline.report.lost_workers import find_losses
from paceline.report.rundata import RunData
from paceline.report.svg import Frame, axes, polygon, rect, svg, text, ticks

WIDTH, LEFT, LANE, GAP = 860, 74, 36, 8
COLOURS = {
    PREFILL: "#2aa3a3",
    PLAIN: "#8b95a7",
    SPECULATIVE: "#3b7dc4",
    IDLE: "#d9b38c",
    TRAIN: "#2f9e6e",
    MERGE: "#a3c585",
    REWARD: "#c08a1e",
    UPDATE: "#8a63d2",
    SAVE: "#b0524a",
    LOST: "currentColor",
}
OTHER = "#c2438f"
NARROWEST = 0.7


def kinds(spans: Iterable[Span]) -> dict[str, str]:
    """Name and colour of what occurs, in the order of a step."""
    found = {span.name for span in spans} - {ROLLOUT}
    return {n: c for n, c in COLOURS.items() if n in found} | dict.fromkeys(sorted(found - COLOURS.keys()), OTHER)


def by_step(run: RunData) -> dict[int, list[Span]]:
    """What is drawn of each step. A worker may be lost for several: each shows its part of that."""
    out: dict[int, list[Span]] = {}
    for span in run.spans:
        if span.name not in (ROLLOUT, LOST):
            out.setdefault(span.step, []).append(span)
    lost = [(s.worker, s.start, s.end) for s in run.spans if s.name == LOST]
    for loss in find_losses(run):
        if loss.worker is not None and loss.back is None:  # from the end of what is known of it
            known = [s.end for s in run.spans if s.worker == loss.worker and s.step <= loss.step]
            first = min((s.start for s in out.get(loss.step, [])), default=0.0)
            lost.append((loss.worker, max([*known, first]), math.inf))
    for step, spans in out.items():
        begin, end = min(s.start for s in spans), max(s.end for s in spans)
        for worker, since, until in lost:
            start, stop = max(begin, since), min(end, until)
            if start < stop:
                spans.append(Span(worker, LOST, start, stop - start, step, {}))
    return out


def draw_lanes(spans: list[Span], workers: list[int]) -> str:
    """One step."""
    begin, end = min(s.start for s in spans), max(s.end for s in spans)
    span_s = max(end - begin, 1e-6)
    height = len(workers) * (LANE + GAP) - GAP
    frame = Frame(LEFT, 8, WIDTH - LEFT - 24, height, 0.0, span_s, 0.0, 1.0)
    parts = [axes(frame, "seconds", ticks(0, span_s, 8), [])]
    peak = max([1, *(max(s.args["batch"]) for s in spans if "batch" in s.args)])
    for i, worker in enumerate(workers):
        top = frame.top + i * (LANE + GAP)
        parts.append(text(LEFT - 10, top + LANE / 2 + 4, f"worker {worker}", anchor="end"))
        parts.append(rect(LEFT, top, frame.width, LANE, "currentColor", more=' fill-opacity="0.05"'))
        for span in spans:
            if span.worker == worker:
                parts.append(_draw(span, frame, begin, top, peak))
    return svg(WIDTH, frame.bottom + 46, "".join(parts), "what each worker did in the step")


def _draw(span: Span, frame: Frame, begin: float, top: float, peak: int) -> str:
    left, right = frame.x(span.start - begin), frame.x(span.end - begin)
    right = max(right, left + NARROWEST)
    colour, title = COLOURS.get(span.name, OTHER), _title(span, begin)
    if "batch" not in span.args:
        return rect(left, top, right - left, LANE, colour, title)
    first, last = (LANE * n / peak for n in span.args["batch"])
    floor = top + LANE
    ground = rect(left, top, right - left, LANE, colour, title, ' fill-opacity="0.25"')
    corners = [(left, floor), (left, floor - first), (right, floor - last), (right, floor)]
    return ground + polygon(corners, colour, title)


def _title(span: Span, begin: float) -> str:
    words = [f"{span.name}: {span.seconds:.3f} s from {span.start - begin:.3f} s"]
    if "rounds" in span.args:
        words.append(f"{span.args['rounds']:,} rounds, {span.args.get('tokens', 0):,} tokens")
    if "batch" in span.args:
        words.append("batch {} to {}".format(*span.args["batch"]))
    return ", ".join(words)
