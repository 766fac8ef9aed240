"""The spans of every worker over time: `RUN/timeline.json`, a Chrome trace that Perfetto opens and the report draws.

The file is a JSON array with one event per line. The closing bracket is written when the run has ended, so a run that
was killed leaves an array without its end; trace viewers accept that, and so does `read_timeline`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from paceline.errors import UserError
from paceline.files import reading
from paceline.files.writing import append_text, write_aside

# Names of spans, in the order of a step.
PREFILL = "prefill"
DECODE_PLAIN = "decode plain"
DECODE_SPECULATIVE = "decode speculative"
IDLE = "idle"
AHEAD = "write ahead"
TOOLS = "wait for tools"
TRAIN = "train drafter"
MERGE = "merge drafter"
REWARD = "reward"
UPDATE = "update"
EVALUATE = "evaluate"
SAVE = "save"
LOST = "lost"
"""From when a worker stopped answering until it took part again."""
ROLLOUT = "rollout"
"""Encloses the rounds of one rollout; its arguments are their sums (see `rounds.py`)."""

PROCESS = 1  # viewers give process 0 and thread 0 a meaning of their own


class Span(NamedTuple):
    """A worker did one thing for a while. A plain tuple, so that workers can send it to the process that writes the
    file."""

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
        """Appends to the file if there is one. Spans after `last_step` are dropped, because a resumed run makes them
        again, and the time in which nothing ran is left out."""
        self.file = file
        kept = [span for span in read_timeline(file) if span.step <= last_step]
        self._zero = time.time() - max((span.end for span in kept), default=0.0)
        self._named: set[int] = set()
        first = {"name": "process_name", "ph": "M", "pid": PROCESS, "args": {"name": "paceline"}}
        lines = [json.dumps(first)]
        for span in kept:
            lines += self._lines(span)
        write_aside(file, "[\n" + ",\n".join(lines))

    def span(self, worker: int, name: str, start: float, seconds: float, step: int, **args: Any) -> None:
        """`start` is `time.time()`: processes of one machine agree on it."""
        self.add(Span(worker, name, start, seconds, step, args))

    def add(self, span: Span) -> None:
        lines = self._lines(span._replace(start=max(0.0, span.start - self._zero)))
        append_text(self.file, "".join(f",\n{line}" for line in lines))

    def close(self) -> None:
        """The run has ended, so the array does."""
        append_text(self.file, "\n]\n")

    def _lines(self, span: Span) -> list[str]:
        """The event of a span, and its lane's name before the first one. Both ends are rounded, not the length, so that
        spans that touch or enclose each other still do."""
        begin = round(span.start * 1e6)
        end = round(span.end * 1e6)
        event = {"name": span.name, "ph": "X", "pid": PROCESS, "tid": span.worker + 1, "ts": begin, "dur": end - begin}
        lines = [json.dumps(event | {"args": {"step": span.step} | span.args}, ensure_ascii=False)]
        if span.worker not in self._named:
            self._named.add(span.worker)
            lane = {"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": span.worker + 1}
            lines.insert(0, json.dumps(lane | {"args": {"name": f"worker {span.worker}"}}))
        return lines


Seconds = Annotated[float, Field(ge=0, le=1e12)]
Count = Annotated[int, Field(ge=0, le=2**62)]
TotalsRow = Annotated[list[Annotated[int | float, Field(ge=0, le=1e12)]], Field(min_length=5, max_length=6)]
"""The fields of `StrategyTotals` from `rounds` on."""


class SpanArgs(TypedDict, total=False):
    """The arguments of a span (see `rounds.py`); other programs may add their own."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    step: Count
    rounds: Count
    tokens: Count
    batch: Annotated[list[Count], Field(min_length=2, max_length=2)]
    tail_s: Seconds
    strategies: dict[str, dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], TotalsRow]]


class TraceEvent(TypedDict):
    """A span as the file has it; times in microseconds."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]
    name: str
    ph: Literal["X"]
    tid: Annotated[int, Field(ge=1, le=2**20)]
    ts: Annotated[float, Field(ge=0, le=1e18)]
    dur: Annotated[float, Field(ge=0, le=1e18)]
    args: SpanArgs


_EVENT = reading.checker(TraceEvent)


def read_timeline(file: Path) -> list[Span]:
    """All spans, whether or not the file has its closing bracket; none if there is no file. Times are since the run
    began. Half a line at the end is skipped, any other damaged line is an error."""
    if not os.path.lexists(file):
        return []
    spans = []
    for number, line in reading.read_lines(reading.inside(file.parent, file.name)):
        where = f"line {number} of {file}"
        bare = line.strip().rstrip(b",")
        if bare in (b"", b"[", b"]"):
            continue
        try:
            event = reading.parse_json(reading.decode(bare, where), where)
        except UserError as err:
            if not line.endswith(b"\n"):  # the last one, which a kill has cut
                break
            raise UserError(f"{err}; fix or remove that line") from err
        if not isinstance(event, dict):
            raise UserError(f"{where} is not an event of a timeline; fix or remove that line")
        if event.get("ph") != "X":
            continue
        checked = _EVENT(event, where)
        args: dict[str, Any] = dict(checked["args"])
        if "step" not in args:
            raise UserError(f"{where} has no step; fix or remove that line")
        step = args.pop("step")
        start = checked["ts"] / 1e6
        seconds = checked["dur"] / 1e6
        spans.append(Span(checked["tid"] - 1, checked["name"], start, seconds, step, args))
    return spans
