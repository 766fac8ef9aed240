"""The table that ends a run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from rich.table import Table

from paceline.observe.metrics import speculating
from paceline.observe.step_text import PARTS, describe_workers, sparkline

Rows = list[dict[str, Any]]


def summary(rows: Rows) -> Table:
    """Of the metrics of all steps."""
    rewards = [row.get("critic/rewards/mean", math.nan) for row in rows] or [math.nan]
    third = max(1, len(rewards) // 3)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("steps", str(len(rows)))
    table.add_row("mean reward", f"first {rewards[0]:.3f}, last {rewards[-1]:.3f}")
    table.add_row("by thirds", f"first {np.mean(rewards[:third]):.3f}, last {np.mean(rewards[-third:]):.3f}")
    table.add_row("reward", sparkline(rewards))
    table.add_row("rollout", _rollout(rows))
    table.add_row("seconds per step", _seconds(rows))
    if workers := _workers(rows):
        table.add_row("workers", workers)
    if invested := _invested(rows):
        table.add_row("drafter", invested)
    return table


def _rollout(rows: Rows) -> str:
    speed = f"{_median(rows, 'rollout/tok_s'):,.0f} tokens/s (median)"
    lengths = [row.get("rollout/spec_accept_length", math.nan) for row in speculating(rows)]
    return speed + (f", accept length {np.median(lengths):.2f} (while speculating)" if lengths else "")


def _seconds(rows: Rows) -> str:
    parts = [part for part in PARTS if any(f"timing_s/{part}" in row for row in rows)]
    split = ", ".join(f"{part} {_median(rows, f'timing_s/{part}'):.2f}" for part in parts)
    return f"{_median(rows, 'timing_s/step'):.2f} (median): {split}"


def _workers(rows: Rows) -> str:
    several = [row for row in rows if "cluster/workers" in row]
    if not several:
        return ""
    total = {
        name: sum(row.get(name, 0.0) for row in several)
        for name in ("cluster/lost", "cluster/training_s", "cluster/ahead_s")
    }
    most = max(row["cluster/workers"] for row in several)
    return describe_workers(total | {"cluster/workers": most}).replace(" workers", "", 1)


def _invested(rows: Rows) -> str:
    steps = [row for row in rows if row.get("drafter/invested_s", 0.0) > 0]
    if not steps:
        return ""
    seconds = sum(row["drafter/invested_s"] for row in steps)
    return f"{seconds:.1f} s of training beyond idle time, in {len(steps)} steps, because it was expected to pay back"


def _median(rows: Rows, name: str) -> float:
    """Over steps; a step without the metric counts as 0."""
    return float(np.median([row.get(name, 0.0) for row in rows] or [math.nan]))
