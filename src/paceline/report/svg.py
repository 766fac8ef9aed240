"""Pictures as SVG: a frame with axes, and the shapes that are drawn into it.

Text and lines take the text colour of the page (`currentColor`), so that it can be light or dark; areas have colours
that can be seen on both. A `title` is shown as a tooltip."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

INK = "#1f2430"
PAPER = "#ffffff"
PICTURE_WIDTH = 860
PHONE_WIDTH = 350
_width = ContextVar("width of the picture that is drawn", default=PICTURE_WIDTH)
PALETTE = ("#9aa3b2", "#3b7dc4", "#d0672b", "#2f9e6e", "#8a63d2", "#c2438f", "#c08a1e", "#2aa3a3", "#6b7688", "#d9534f")
FLAT = 0.25
"""An axis begins at 0 if its values differ by so much of the largest; flatter curves would show nothing."""
LETTER_WIDTH = 6.7  # of a label, on average


def picture_width() -> int:
    """Of the picture that is being drawn."""
    return _width.get()


def fewer(most: int) -> int:
    """As many labels as there is space for, of `most` in a wide picture."""
    return max(3, most * picture_width() // PICTURE_WIDTH)


@contextmanager
def _drawn(width: int) -> Iterator[None]:
    before = _width.set(width)
    try:
        yield
    finally:
        _width.reset(before)


def for_both(draw: Callable[[], str]) -> str:
    """A picture for wide windows and one for phones, whose letters are as large; the style of the page shows one. A
    finger cannot point at anything, so that the one for phones goes without tooltips."""
    wide = draw()
    if not wide:
        return ""
    with _drawn(PHONE_WIDTH):
        narrow = re.sub(r"<title>.*?</title>| data-[a-z]+=\"[^\"]*\"", "", draw())
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


@dataclass(frozen=True)
class Frame:
    """A rectangle of the picture, and the values at its edges: `x`, `y` map values to picture points."""

    left: float
    top: float
    width: float
    height: float
    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return self.left + self.width * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - (value - self.y0) / (self.y1 - self.y0))

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height


def text(x: float, y: float, words: str, bold: bool = False, anchor: str = "start", faint: bool = False) -> str:
    style = (' font-weight="600"' if bold else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    style += ' opacity="0.7"' if faint else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12"{style} fill="currentColor">{html.escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, colour: str, title: str = "", more: str = "") -> str:
    box = f'x="{x:.2f}" y="{y:.2f}" width="{max(0.0, width):.2f}" height="{max(0.0, height):.2f}"'
    return _with_title("rect", f'{box} fill="{colour}"{more}', title)


def polygon(points: Iterable[tuple[float, float]], colour: str, title: str = "") -> str:
    corners = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    return _with_title("polygon", f'points="{corners}" fill="{colour}"', title)


def dot(x: float, y: float, colour: str, radius: float, title: str, more: str = "") -> str:
    return _with_title("circle", f'cx="{x:.2f}" cy="{y:.2f}" r="{radius}" fill="{colour}"{more}', title)


def rule(x1: float, y1: float, x2: float, y2: float, opacity: float = 0.14, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="currentColor" stroke-opacity="{opacity}"{dashes}/>'


def lines(points: Sequence[tuple[float, float] | None], colour: str, width: float = 1.8) -> str:
    """A line through the points, broken where one is missing."""
    parts: list[str] = []
    connected: list[str] = []
    for point in [*points, None]:
        if point is not None:
            connected.append(f"{point[0]:.1f},{point[1]:.1f}")
        elif connected:
            style = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"'
            parts.append(f'<polyline points="{" ".join(connected)}" {style}/>')
            connected = []
    return "".join(parts)


def axes(frame: Frame, x_name: str, x_ticks: Sequence[float], y_ticks: Sequence[float], y_name: str = "") -> str:
    parts = []
    for value in y_ticks:
        parts.append(rule(frame.left, frame.y(value), frame.right, frame.y(value)))
        parts.append(text(frame.left - 8, frame.y(value) + 4, number(value), anchor="end", faint=True))
    for value in x_ticks:
        parts.append(text(frame.x(value), frame.bottom + 18, number(value), anchor="middle", faint=True))
    parts.append(rule(frame.left, frame.bottom, frame.right, frame.bottom, 0.4))
    parts.append(text(frame.left + frame.width / 2, frame.bottom + 36, x_name, anchor="middle", faint=True))
    if y_name:
        parts.append(text(frame.left, frame.top - 10, y_name, anchor="start", faint=True))
    return "".join(parts)


def legend(entries: dict[str, str], left: float, top: float, right: float) -> tuple[str, float]:
    """Names with their colours, in as many rows as needed -> the picture, and the y at which it ends."""
    parts = []
    x, y = left, top
    for name, colour in entries.items():
        width = 17 + LETTER_WIDTH * len(name)
        if x > left and x + width > right:
            x, y = left, y + 20
        parts += [rect(x, y - 10, 12, 12, colour), text(x + 17, y, name)]
        x += width + 16
    return "".join(parts), y


def svg(width: float, height: float, body: str, label: str = "", paper: bool = False) -> str:
    """With `paper` it is dark on white, as a file of its own; without, it takes the colours of its page."""
    colours = f' color="{INK}"' if paper else ""
    background = f'<rect width="100%" height="100%" fill="{PAPER}"/>' if paper else ""
    named = f' role="img" aria-label="{html.escape(label)}"' if label else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="system-ui, sans-serif"{colours}{named}>'
        f"{background}{body}</svg>\n"
    )


def ticks(low: float, high: float, most: int = 6, whole: bool = False) -> list[float]:
    """About `most` round numbers from `low` to `high`."""
    rough = (high - low) / max(1, most)
    if rough <= 0 or not math.isfinite(rough):
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    if whole:
        size = max(1.0, math.ceil(size))
    first = math.ceil(low / size - 1e-9)
    return [round((first + i) * size, 10) for i in range(most + 2) if (first + i) * size <= high + 1e-9 * size]


def axis_range(values: Iterable[float], from_zero: bool = True) -> tuple[float, float]:
    """Lower and upper end of an axis: all finite values and, unless it may begin elsewhere, 0; with a margin of 8 % on
    the sides that are not at 0."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if from_zero or low <= 0 <= high or high - low >= FLAT * max(abs(low), abs(high)):
        low, high = min(0.0, low), max(0.0, high)
    margin = 0.08 * (high - low) or max(0.1, 0.1 * abs(high))
    return (low - margin if low else 0.0), (high + margin if high or not low else 0.0)


def begins(low: float, high: float) -> str:
    """Behind the name of an axis that does not begin at 0."""
    return "" if low <= 0 <= high else f" (axis from {number(low)})"


def number(value: float) -> str:
    """Three significant digits, more only for whole numbers."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if value == round(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _with_title(tag: str, attributes: str, title: str) -> str:
    if not title:
        return f"<{tag} {attributes}/>"
    return f"<{tag} {attributes}><title>{html.escape(title)}</title></{tag}>"
