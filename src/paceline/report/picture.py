"""`compare.svg`: batch size, strategy and tokens/s of a rollout over time, one panel per mode of rollout."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paceline.report.svg import PALETTE, PICTURE_WIDTH, Frame, legend, lines, rect, svg, text

if TYPE_CHECKING:
    from paceline.rollout.stats import RoundRecord

PANEL_HEIGHT = 150
PANEL_LEFT = 64
PANEL_TOP = 46
PANEL_GAP = 44
PREFILL_COLOUR = "#d6bcfa"
HUES = (210, 150, 25, 300)
"""Of drafters: blue, green, orange, violet."""
LIGHTEST = 72  # per cent
DARKEST = 38
SPEED_POINTS = 60  # of the line of tokens/s: single rounds would hide its course


def draw_rollouts(modes: dict[str, list[RoundRecord]]) -> str:
    """An SVG of the rounds of each mode, on a common time axis."""
    modes = {name: rounds for name, rounds in modes.items() if rounds}
    if not modes:
        return svg(PICTURE_WIDTH, 120, text(PANEL_LEFT, PANEL_TOP, "no rounds were recorded"), paper=True)
    longest = max(_seconds(rounds) for rounds in modes.values())
    colours = strategy_colours({r.strategy for rounds in modes.values() for r in rounds})
    parts: list[str] = []
    peak = max(r.batch for rounds in modes.values() for r in rounds)
    fastest = max(speed for rounds in modes.values() for _, speed in _speeds(rounds))
    y = PANEL_TOP
    for name, rounds in modes.items():
        parts += _panel(name, rounds, y, (longest, peak, fastest), colours)
        y += PANEL_HEIGHT + PANEL_GAP
    names, end = legend(colours, PANEL_LEFT, y, PICTURE_WIDTH - 20)
    return svg(PICTURE_WIDTH, end + 24, "".join(parts) + names, paper=True)


def strategy_colours(names: set[str]) -> dict[str, str]:
    """Plain decoding is grey; a drafter has one colour, and its strategies shades of it, the longer ones darker."""
    fixed = {name: colour for name, colour in (("plain", PALETTE[0]), ("prefill", PREFILL_COLOUR)) if name in names}
    drafters: dict[str, list[str]] = {}
    for name in sorted(names - fixed.keys(), key=lambda name: ([int(n) for n in re.findall(r"\d+", name)], name)):
        drafters.setdefault(name.partition(":")[0], []).append(name)
    shades = {}
    for i, drafter in enumerate(sorted(drafters)):
        for j, name in enumerate(drafters[drafter]):
            lightness = LIGHTEST - (LIGHTEST - DARKEST) * j / max(1, len(drafters[drafter]) - 1)
            shades[name] = f"hsl({HUES[i % len(HUES)]} 55% {lightness:.0f}%)"
    return fixed | shades


def _panel(
    name: str, rounds: list[RoundRecord], top: int, scale: tuple[float, int, float], colours: dict[str, str]
) -> list[str]:
    """Bars as high as the batch, coloured by strategy, under a line of tokens/s. All panels have the same scale: the
    longest time, the largest batch and the highest speed of any."""
    longest, peak, fastest = scale
    start = rounds[0].at
    seconds = _seconds(rounds)
    frame = Frame(PANEL_LEFT, top, PICTURE_WIDTH - PANEL_LEFT - 70, PANEL_HEIGHT, 0.0, longest, 0.0, peak)
    tokens = sum(r.tokens for r in rounds)
    title = f"{name}: {seconds:.2f} s, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"
    parts = [text(PANEL_LEFT, top - 10, title, bold=True)]
    outline = ' stroke="currentColor" stroke-opacity="0.14"'
    parts.append(rect(frame.left, frame.top, frame.width, frame.height, "none", more=outline))
    for r in rounds:
        x = frame.x(r.at - start)
        width = max(0.4, frame.width * r.seconds / longest)
        parts.append(rect(x, frame.y(r.batch), width, frame.bottom - frame.y(r.batch), colours[r.strategy]))
    speeds = _speeds(rounds)
    points = [(frame.x(t - start), frame.bottom - (PANEL_HEIGHT - 6) * v / fastest) for t, v in speeds]
    parts.append(lines(points, "currentColor", 1.4))
    parts += [text(8, top + 10, f"batch {peak}"), text(8, frame.bottom, "0")]
    parts.append(text(frame.right + 6, top + 10, f"{fastest:,.0f}/s"))
    for i in range(5):
        parts.append(text(frame.x(longest * i / 4) - 8, frame.bottom + 14, f"{longest * i / 4:.1f} s"))
    return parts


def _seconds(rounds: list[RoundRecord]) -> float:
    return rounds[-1].at + rounds[-1].seconds - rounds[0].at


def _speeds(rounds: list[RoundRecord]) -> list[tuple[float, float]]:
    """(time, tokens/s), averaged over equal intervals."""
    interval = _seconds(rounds) / SPEED_POINTS
    since = rounds[0].at
    tokens = 0
    out = []
    for r in rounds:
        tokens += r.tokens
        now = r.at + r.seconds
        if now - since >= interval:
            out.append(((since + now) / 2, tokens / (now - since)))
            tokens = 0
            since = now
    return out or [(since, 1.0)]
