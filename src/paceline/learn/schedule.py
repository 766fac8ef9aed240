"""The learning rate over the course of a run."""

from __future__ import annotations

import math


def learning_rate(update: int, total: int, peak: float, warmup: int, decay: str, end: float) -> float:
    """Rate of update number `update` (from 0) of `total`: linear warm-up, then constant, or down to `end * peak`."""
    if update < warmup:
        return peak * (update + 1) / (warmup + 1)
    if decay == "constant":
        return peak
    done = min(1.0, (update - warmup) / max(1, total - 1 - warmup))
    left = 1 - done if decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (end + (1 - end) * left)
