"""What every worker did when: `RUN/timeline.json`, a Chrome trace that Perfetto opens and the report draws.

The file is a JSON array with one event per line. The closing bracket is written when the run has ended, so a run that
was killed leaves an array without its end; trace viewers accept that, and so does `read_timeline`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

PREFILL, PLAIN, SPECULATIVE = "prefill", "decode plain", "decode speculative"
IDLE, TRAIN, MERGE, REWARD, UPDATE, SAVE = "idle", "train drafter", "merge drafter", "reward", "update", "save"
LOST = "lost"
"""From when a worker was missed until it took part again."""
ROLLOUT = "rollout"
"""Encloses the rounds of one rollout and says what they came to (see `rounds.py`)."""

PROCESS = 1  # viewers give process 0 and thread 0 a meaning of their own


class Span(NamedTuple):
    """A worker was busy with one thing. A plain tuple, so that workers can send it to whoever writes the file."""

    worker: int
    name: str
    start: float
    """Seconds: by the wall clock when it is written, since the run began when it is read."""
    seconds: float
    step: int
    args: dict[str, Any]

    @property
    def end(self) -> float:
        return self.start + self.seconds


class Timeline:
    def __init__(self, file: Path, last_step: int = 0):
        """Goes on with the file if there is one, behind its last event: what came after `last_step` is forgotten,
        because a resumed run makes it again, and the time in which nothing ran is left out."""
        self.file = file
        kept = [span for span in read_timeline(file) if span.step <= last_step]
        self._zero = time.time() - max((span.end for span in kept), default=0.0)
        self._named: set[int] = set()
        first = {"name": "process_name", "ph": "M", "pid": PROCESS, "args": {"name": "paceline"}}
        lines = [json.dumps(first)]
        for span in kept:
            lines += self._lines(span)
        aside = file.with_suffix(".tmp")
        aside.write_text("[\n" + ",\n".join(lines), encoding="utf-8")
        aside.replace(file)

    def span(self, worker: int, name: str, start: float, seconds: float, step: int, **args: Any) -> None:
        """`start` is `time.time()`: processes of one machine agree on it."""
        self.add(Span(worker, name, start, seconds, step, args))

    def add(self, span: Span) -> None:
        lines = self._lines(span._replace(start=max(0.0, span.start - self._zero)))
        with open(self.file, "a", encoding="utf-8") as out:
            out.write("".join(f",\n{line}" for line in lines))

    def close(self) -> None:
        """The run has ended, so the array does."""
        with open(self.file, "a", encoding="utf-8") as out:
            out.write("\n]\n")

    def _lines(self, span: Span) -> list[str]:
        """The event of a span, and its lane's name before the first one. Both ends are rounded, not the length, so that
        spans that touch or enclose each other still do."""
        begin, end = round(span.start * 1e6), round(span.end * 1e6)
        event = {"name": span.name, "ph": "X", "pid": PROCESS, "tid": span.worker + 1, "ts": begin, "dur": end - begin}
        lines = [json.dumps(event | {"args": {"step": span.step} | span.args}, ensure_ascii=False)]
        if span.worker not in self._named:
            self._named.add(span.worker)
            lane = {"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": span.worker + 1}
            lines.insert(0, json.dumps(lane | {"args": {"name": f"worker {span.worker}"}}))
        return lines


def read_timeline(file: Path) -> list[Span]:
    """All whole spans, whether or not the file has its end; none if there is no file. Times are since the run began."""
    if not file.is_file():
        return []
    spans = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line.rstrip(","))
        except json.JSONDecodeError:  # a bracket, or half a line at the end
            continue
        if isinstance(event, dict) and event.get("ph") == "X":
            args = dict(event["args"])
            step = args.pop("step")
            start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
            spans.append(Span(event["tid"] - 1, event["name"], start, seconds, step, args))
    return spans
