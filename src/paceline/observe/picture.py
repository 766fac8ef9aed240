"""A rollout as a picture: batch size, strategy and tokens/s over time, one row of panels per way of running it."""

from __future__ import annotations

import html
from typing import Any

WIDTH, PANEL, LEFT, TOP, GAP = 860, 150, 64, 46, 44
INK, PAPER, GRID = "#1f2430", "#ffffff", "#e3e6ec"
COLOURS = ("#9aa3b2", "#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#b7791f", "#319795", "#4a5568", "#e53e3e")
PREFILL = "#d6bcfa"


def draw_rollouts(ways: dict[str, list[Any]]) -> str:
    """An SVG of the rounds (at, seconds, batch, strategy, tokens) of each way, on a common time axis."""
    ways = {name: rounds for name, rounds in ways.items() if rounds}
    if not ways:
        return _svg(120, _text(LEFT, TOP, "no rounds were recorded"))
    span = max(r[-1].at + r[-1].seconds - r[0].at for r in ways.values())
    names = sorted({r.strategy for rounds in ways.values() for r in rounds} - {"prefill", "plain"})
    colours = {"plain": COLOURS[0], "prefill": PREFILL}
    colours |= {name: COLOURS[1 + i % (len(COLOURS) - 1)] for i, name in enumerate(names)}
    parts: list[str] = []
    most = max(r.batch for rounds in ways.values() for r in rounds)
    y = TOP
    for name, rounds in ways.items():
        parts += _panel(name, rounds, y, span, most, colours)
        y += PANEL + GAP
    used = [n for n in colours if any(r.strategy == n for rounds in ways.values() for r in rounds)]
    x = LEFT
    for name in used:
        label_width = 26 + 7 * len(name)
        if x + label_width > WIDTH - 20:
            x, y = LEFT, y + 20
        parts += [f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colours[name]}"/>', _text(x + 17, y, name)]
        x += label_width + 12
    return _svg(y + 24, "".join(parts))


def _panel(name: str, rounds: list[Any], top: int, span: float, most: int, colours: dict[str, str]) -> list[str]:
    """Bars as high as the batch, coloured by strategy, under a line of tokens/s."""
    width = WIDTH - LEFT - 70
    start = rounds[0].at
    right = rounds[-1].at + rounds[-1].seconds - start
    tokens = sum(r.tokens for r in rounds)
    title = f"{name}: {right:.2f} s, {tokens:,} tokens, {tokens / right:,.0f} tokens/s"
    parts = [_text(LEFT, top - 10, title, bold=True)]
    parts.append(f'<rect x="{LEFT}" y="{top}" width="{width}" height="{PANEL}" fill="none" stroke="{GRID}"/>')
    for r in rounds:
        x, w = LEFT + width * (r.at - start) / span, max(0.4, width * r.seconds / span)
        h, colour = PANEL * r.batch / most, colours[r.strategy]
        parts.append(f'<rect x="{x:.2f}" y="{top + PANEL - h:.2f}" width="{w:.2f}" height="{h:.2f}" fill="{colour}"/>')
    speeds = _speeds(rounds)
    fastest = max(v for _, v in speeds)
    points = " ".join(
        f"{LEFT + width * (t - start) / span:.1f},{top + PANEL - (PANEL - 6) * v / fastest:.1f}" for t, v in speeds
    )
    parts.append(f'<polyline points="{points}" fill="none" stroke="{INK}" stroke-width="1.4"/>')
    parts += [_text(8, top + 10, f"batch {most}"), _text(8, top + PANEL, "0")]
    parts.append(_text(LEFT + width + 6, top + 10, f"{fastest:,.0f}/s"))
    for i in range(5):
        at = LEFT + width * i / 4
        parts.append(_text(at - 8, top + PANEL + 14, f"{span * i / 4:.1f} s"))
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


def _text(x: float, y: float, text: str, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12"{weight} fill="{INK}">{html.escape(text)}</text>'


def _svg(height: float, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="system-ui, sans-serif">'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>{body}</svg>\n'
    )
