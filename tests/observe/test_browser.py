"""The report in a real browser: nothing on the console, every figure drawn, no label on top of another."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from paceline.report.page import page, write_report
from paceline.report.rundata import read_run
from paceline.report.savings import measure_savings

from .conftest import made_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="the report was not looked at: no chromium, chromium-browser or google-chrome here"
)
CHARTS = {"fig-reward", "fig-length", "fig-histogram", "fig-accept", "fig-strategies"}

# Added to a copy of the page: opens everything, then measures what is on the screen, tab by tab.
LOOK = """<script>
document.querySelectorAll("details").forEach(d => d.open = true);
const box = e => e.getBoundingClientRect();
const beside = (a, b) => a.right <= b.left + 1 || a.bottom <= b.top + 2;
const apart = (a, b) => beside(a, b) || beside(b, a);
const figures = {}, seen = {figures, wide: 0, tabs: [], inner: innerWidth};
const measure = () => document.querySelectorAll("figure").forEach(figure => {
  if (!box(figure).width) return;
  const svg = [...figure.querySelectorAll("svg")].find(s => box(s).width);
  if (!svg) { figures[figure.id] = null; return; }
  const shapes = "rect, polygon, circle, polyline";
  const outer = box(svg), marks = [...svg.querySelectorAll(shapes)].map(box), texts = [...svg.querySelectorAll("text")];
  const boxes = texts.map(box), clashes = [];
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b, j) => {
    if (!apart(a, b)) clashes.push(texts[i].textContent + " | " + texts[i + 1 + j].textContent);
  }));
  const inside = b => b.left >= outer.left - 1 && b.right <= outer.right + 1 && b.top >= outer.top - 1
    && b.bottom <= outer.bottom + 1;
  const out = [...texts.filter(t => !inside(box(t))).map(t => t.textContent)];
  figures[figure.id] = {
    width: outer.width, height: outer.height, marks: marks.filter(b => b.width + b.height > 1).length,
    outside: out.concat(marks.filter(b => !inside(b)).map(() => "a mark")), clashes,
    letters: texts.length ? 12 * outer.width / svg.viewBox.baseVal.width : 12,
  };
});
const tabs = [...document.querySelectorAll(".tabs > input")];
(tabs.length ? tabs : [null]).forEach(tab => {
  if (tab) { tab.checked = true; seen.tabs.push(tab.id); }
  measure();
  seen.wide = Math.max(seen.wide, document.documentElement.scrollWidth - innerWidth);
});
seen.paper = getComputedStyle(document.body).backgroundColor;
parent.document.body.dataset.seen = JSON.stringify(seen);
console.log("looked");
</script>"""


def look(text: str, folder: Path, width: int = 1280, dark: bool = False) -> dict:
    """What a browser sees. Its own word that it looked shows that we would have heard of errors too."""
    copy = folder / "page.html"
    page = escape(text.replace("</body>", LOOK + "</body>"))
    # In a frame, because no window is as narrow as a phone.
    frame = f'<iframe style="border:0;width:{width}px;height:1000px" srcdoc="{page}"></iframe>'
    copy.write_text(f'<!doctype html><link rel="icon" href="data:,"><body>{frame}</body>')
    done = subprocess.run(
        [
            str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
            "--virtual-time-budget=3000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 600)},1000",
            "--dump-dom", copy.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert len(said) == 1 and '"looked"' in said[0], said
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, "the page was not measured"
    return json.loads(unescape(found.group(1)))


def check(seen: dict) -> None:
    assert seen["wide"] <= 0, "the page is wider than the window"
    assert seen["tabs"] == ["tab-speed", "tab-learning", "tab-settings"]
    for name, figure in seen["figures"].items():
        assert figure is not None, f"{name} has no drawing"
        assert figure["width"] > 300 and figure["height"] > 60 and figure["marks"] > 0, (name, figure)
        assert not figure["outside"] and not figure["clashes"], (name, figure)
        assert figure["letters"] >= 9, (name, "is too small to read")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 700, 390])
def test_a_real_run(real_run, tmp_path, width, dark):
    seen = look(write_report(real_run)[0].read_text(), tmp_path, width, dark)
    check(seen)
    assert seen["inner"] == width and (seen["paper"] == "rgb(255, 255, 255)") != dark
    assert seen["figures"].keys() >= CHARTS | {f"fig-lanes-{step}" for step in (1, 2, 3, 4)}


def test_two_workers_of_which_one_is_lost(struck_run, tmp_path):
    seen = look(write_report(struck_run)[0].read_text(), tmp_path)
    check(seen)
    assert seen["figures"].keys() >= CHARTS | {f"fig-lanes-{step}" for step in (1, 2, 3, 4, 5)}


@pytest.mark.parametrize("steps", [1, 30, 400])
def test_many_workers_and_a_changing_drafter(tmp_path, steps):
    seen = look(
        write_report(made_run(tmp_path / "run", steps, workers=8 if steps < 400 else 1))[0].read_text(), tmp_path
    )
    check(seen)
    assert seen["figures"].keys() > CHARTS


def test_a_run_in_which_nothing_has_happened_yet(tmp_path):
    run = read_run(made_run(tmp_path / "run", steps=0, planned=3))
    assert look(page(run, measure_savings(run)), tmp_path)["figures"] == {}


def test_a_run_without_speculation_says_so_instead_of_a_figure(tmp_path):
    text = write_report(made_run(tmp_path / "run", 5, speculate=False))[0].read_text()
    seen = look(text, tmp_path)
    assert seen["figures"].pop("fig-accept") is None
    check(seen)
