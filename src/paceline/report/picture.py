"""A rollout as a picture: batch size, strategy and tokens/s over time, one row of panels per way of running it."""

from __future__ import annotations

from typing import Any

from paceline.report.svg import COLOURS, Frame, legend, lines, rect, svg, text

WIDTH, PANEL, LEFT, TOP, GAP = 860, 150, 64, 46, 44
PREFILL = "#d6bcfa"


def draw_rollouts(ways: dict[str, list[Any]]) -> str:
    """An SVG of the rounds (at, seconds, batch, strategy, tokens) of each way, on a common time axis."""
    ways = {name: rounds for name, rounds in ways.items() if rounds}
    if not ways:
        return svg(WIDTH, 120, text(LEFT, TOP, "no rounds were recorded"), paper=True)
    span = max(r[-1].at + r[-1].seconds - r[0].at for r in ways.values())
    colours = strategy_colours({r.strategy for rounds in ways.values() for r in rounds})
    parts: list[str] = []
    most = max(r.batch for rounds in ways.values() for r in rounds)
    y = TOP
    for name, rounds in ways.items():
        parts += _panel(name, rounds, y, span, most, colours)
        y += PANEL + GAP
    names, end = legend(colours, LEFT, y, WIDTH - 20)
    return svg(WIDTH, end + 24, "".join(parts) + names, paper=True)


def strategy_colours(names: set[str]) -> dict[str, str]:
    """Plain decoding is grey, and every way of guessing has a colour of its own while there are enough."""
    fixed = {name: colour for name, colour in (("plain", COLOURS[0]), ("prefill", PREFILL)) if name in names}
    others = sorted(names - fixed.keys())
    return fixed | {name: COLOURS[1 + i % (len(COLOURS) - 1)] for i, name in enumerate(others)}


def _panel(name: str, rounds: list[Any], top: int, span: float, most: int, colours: dict[str, str]) -> list[str]:
    """Bars as high as the batch, coloured by strategy, under a line of tokens/s."""
    start, seconds = rounds[0].at, rounds[-1].at + rounds[-1].seconds - rounds[0].at
    frame = Frame(LEFT, top, WIDTH - LEFT - 70, PANEL, 0.0, span, 0.0, most)
    tokens = sum(r.tokens for r in rounds)
    title = f"{name}: {seconds:.2f} s, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"
    parts = [text(LEFT, top - 10, title, bold=True)]
    outline = ' stroke="currentColor" stroke-opacity="0.14"'
    parts.append(rect(frame.left, frame.top, frame.width, frame.height, "none", more=outline))
    for r in rounds:
        x, width = frame.x(r.at - start), max(0.4, frame.width * r.seconds / span)
        parts.append(rect(x, frame.y(r.batch), width, frame.bottom - frame.y(r.batch), colours[r.strategy]))
    speeds = _speeds(rounds)
    fastest = max(v for _, v in speeds)
    points = [(frame.x(t - start), frame.bottom - (PANEL - 6) * v / fastest) for t, v in speeds]
    parts.append(lines(points, "currentColor", 1.4))
    parts += [text(8, top + 10, f"batch {most}"), text(8, frame.bottom, "0")]
    parts.append(text(frame.right + 6, top + 10, f"{fastest:,.0f}/s"))
    for i in range(5):
        parts.append(text(frame.x(span * i / 4) - 8, frame.bottom + 14, f"{span * i / 4:.1f} s"))
    return parts


def _speeds(rounds: list[Any], buckets: int = 60) -> list[tuple[float, float]]:
    """Tokens/s over time, averaged over stretches, so that single rounds do not hide the course."""
    start, end = rounds[0].at, rounds[-1].at + rounds[-1].seconds
    size = (end - start) / buckets
    out, tokens, since = [], 0, start
    for r in rounds:
        tokens += r.tokens
        now = r.at + r.seconds
        if now - since >= size:
            out.append(((since + now) / 2, tokens / (now - since)))
            tokens, since = 0, now
    return out or [(start, 1.0)]
