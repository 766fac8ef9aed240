"""The timeline is a Chrome trace at any moment, and a resumed run goes on with it."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from paceline.observe.timeline import DECODE_PLAIN, Span, Timeline, read_timeline


def test_a_finished_timeline_is_plain_json(tmp_path):
    file = tmp_path / "timeline.json"
    timeline = Timeline(file)
    now = time.time()
    timeline.span(0, DECODE_PLAIN, now + 1, 0.5, 1, tokens=7)
    timeline.add(Span(1, "idle", now + 2, 0.25, 1, {}))
    timeline.close()
    events = json.loads(file.read_text())
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["paceline", "worker 0", "worker 1"]
    first, second = [e for e in events if e["ph"] == "X"]
    assert first["args"] == {"step": 1, "tokens": 7} and first["dur"] == 500_000
    assert second["ts"] - first["ts"] == pytest.approx(1e6, abs=2) and second["tid"] != first["tid"]
    assert first["ts"] == pytest.approx(1e6, abs=1e5), "times count from the beginning of the run"


def test_an_unfinished_timeline_can_be_read(tmp_path):
    file = tmp_path / "timeline.json"
    timeline = Timeline(file)
    timeline.span(0, DECODE_PLAIN, time.time(), 0.5, 1)
    whole = file.read_text()
    assert json.loads(whole + "]"), "only the bracket is missing"
    timeline.span(0, DECODE_PLAIN, time.time(), 0.5, 2)
    file.write_text(file.read_text()[:-20])  # killed while it was writing
    assert [s.step for s in read_timeline(file)] == [1]
    assert read_timeline(tmp_path / "nowhere.json") == []


@pytest.mark.parametrize("finished", [True, False])
def test_a_resumed_run_goes_on_behind_the_last_step_that_counts(tmp_path, finished):
    file = tmp_path / "timeline.json"
    timeline = Timeline(file)
    for step in (1, 2, 3):
        timeline.span(0, DECODE_PLAIN, timeline._zero + 10 * step, 5.0, step)
    if finished:
        timeline.close()
    again = Timeline(file, last_step=2)
    assert [s.step for s in read_timeline(file)] == [1, 2]
    again.span(0, DECODE_PLAIN, time.time(), 1.0, 3)
    again.close()
    spans = read_timeline(file)
    assert [s.step for s in spans] == [1, 2, 3]
    assert spans[2].start == pytest.approx(25.0, abs=0.5), "the time between is left out"
    names = [e["args"]["name"] for e in json.loads(file.read_text()) if e["ph"] == "M"]
    assert names == ["paceline", "worker 0"]


def test_spans_that_touch_still_touch_when_rounded(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    at = timeline._zero
    for i in range(50):
        timeline.span(0, DECODE_PLAIN, at + i / 3e3, 1 / 3e3, 1)
    events = [json.loads(line.rstrip(",")) for line in timeline.file.read_text().splitlines()[3:]]
    assert all(a["ts"] + a["dur"] == b["ts"] for a, b in itertools.pairwise(events))
