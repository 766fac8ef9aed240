"""What `paceline train` says when a run is over, finished or stopped: the table, and where the report is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UserError
from paceline.observe.metrics import read_lines
from paceline.observe.summary import summary

if TYPE_CHECKING:
    from paceline.observe.live import LiveView


def print_summary(view: LiveView, folder: Path) -> None:
    """Whatever is wrong with the page must not spoil a run that is saved."""
    from paceline.report.page import write_report

    page = None
    try:
        page = str(write_report(folder)[0])
        rows = read_lines(folder / "metrics.jsonl")
    except (OSError, UserError) as err:
        view.note(f"the report could not be made: {err}")
        rows = []
    if not rows:
        return
    view.console.print(summary(rows))
    for name, path in {"run": str(folder), "report": page}.items():
        if path:  # in one piece, however long it is, to be copied
            view.console.print(f"[bold]{name:<16}[/]  ", path, sep="", soft_wrap=True)
