"""Spans of the timeline from what a worker reports of a rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.observe.rounds import RoundLog
from paceline.observe.timeline import AHEAD, IDLE, TOOLS, TRAIN, Span

if TYPE_CHECKING:
    from paceline.cluster.messages import RolloutOutcome

NAMES = {"idle": IDLE, "training": TRAIN, "ahead": AHEAD, "tools": TOOLS}


def rollout_spans(outcome: RolloutOutcome) -> list[Span]:
    """Stretches in which it was idle, trained or wrote ahead, and those of its rounds, in the order in which they
    ended; the span around all rounds is the last."""
    spans = [Span(outcome.worker, NAMES[a.kind], a.start, a.seconds, outcome.step, {}) for a in outcome.activities]
    rounds: list[Span] = []
    log = RoundLog(rounds.append, outcome.worker, outcome.clock_offset)
    log.step = outcome.step
    for record in outcome.rounds:
        log(record)
    log.end()
    return sorted(spans + rounds[:-1], key=lambda span: span.end) + rounds[-1:]
