"""The report in a real browser: nothing on the console, every figure drawn, no label on top of another."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from paceline.report.page import page, write_report
from paceline.report.rundata import read_run
from paceline.report.savings import measure_savings

from .conftest import made_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine"
)
CHARTS = {"fig-reward", "fig-length", "fig-histogram", "fig-accept", "fig-strategies"}

# Added to a copy of the page: opens everything, then measures what is on the screen.
LOOK = """<script>
document.querySelectorAll("details").forEach(d => d.open = true);
const box = e => e.getBoundingClientRect();
const beside = (a, b) => a.right <= b.left + 1 || a.bottom <= b.top + 2;
const apart = (a, b) => beside(a, b) || beside(b, a);
const figures = {};
document.querySelectorAll("figure").forEach(figure => {
  const svg = figure.querySelector("svg"), shapes = "rect, polygon, circle, polyline";
  if (!svg) { figures[figure.id] = null; return; }
  const outer = box(svg), marks = [...svg.querySelectorAll(shapes)].map(box), texts = [...svg.querySelectorAll("text")];
  const boxes = texts.map(box), clashes = [];
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b, j) => {
    if (!apart(a, b)) clashes.push(texts[i].textContent + " | " + texts[i + 1 + j].textContent);
  }));
  const inside = b => b.left >= outer.left - 1 && b.right <= outer.right + 1 && b.top >= outer.top - 1
    && b.bottom <= outer.bottom + 1;
  figures[figure.id] = {
    width: outer.width, height: outer.height, marks: marks.filter(b => b.width + b.height > 1).length,
    outside: [...boxes, ...marks].filter(b => !inside(b)).length, clashes,
  };
});
document.body.dataset.seen = JSON.stringify({ figures, wide: document.documentElement.scrollWidth - innerWidth });
console.log("looked");
</script>"""


def look(text: str, folder: Path, width: int = 1200) -> dict:
    """What a browser sees. Its own word that it looked shows that we would have heard of errors too."""
    copy = folder / "page.html"
    copy.write_text(text.replace("</body>", LOOK + "</body>"))
    done = subprocess.run(
        [
            str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
            "--virtual-time-budget=3000", f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1000",
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
    for name, figure in seen["figures"].items():
        assert figure is not None, f"{name} has no drawing"
        assert figure["width"] > 300 and figure["height"] > 60 and figure["marks"] > 0, (name, figure)
        assert figure["outside"] == 0 and not figure["clashes"], (name, figure)


@pytest.mark.parametrize("width", [1200, 700])
def test_a_real_run(real_run, tmp_path, width):
    seen = look(write_report(real_run)[0].read_text(), tmp_path, width)
    check(seen)
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
    assert look(page(run, measure_savings(run)), tmp_path) == {"figures": {}, "wide": 0}


def test_a_run_without_speculation_says_so_instead_of_a_figure(tmp_path):
    text = write_report(made_run(tmp_path / "run", 5, speculate=False))[0].read_text()
    seen = look(text, tmp_path)
    assert seen["figures"].pop("fig-accept") is None
    check(seen)
