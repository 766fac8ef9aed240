"""CUDA graphs that are captured when an engine is made, so that its rounds need not wait for them.

A round of every strategy that may pay is run at every batch size of the ladder, with no request in the batch: all rows
are neutral, as those that pad a graph, and write to scratch slots only. What is left out (large batches of long drafts,
sampling filters, catch-up passes) is captured on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.draft.base import BaseDrafter
from paceline.draft.strategy import PLAIN, Strategy
from paceline.rollout.runner import ModelRunner, PassRows

MAX_ROWS = 1024  # of a pass: beyond, verifying a draft takes several times as long as plain decoding on any GPU


def rounds_to_capture(ladder: Sequence[int], strategies: Sequence[Strategy]) -> list[tuple[int, Strategy]]:
    """Batch sizes and strategies: plain decoding at every size, then drafts from small batches on, which the tail of a
    rollout needs most if memory for graphs runs out."""
    drafted = [s for s in strategies if not s.plain]
    plain = [(batch, PLAIN) for batch in ladder]
    return plain + [(b, s) for b in ladder for s in drafted if s.fits(b) and s.pass_rows(b) <= MAX_ROWS]


def run_empty_round(runner: ModelRunner, drafters: Mapping[str, BaseDrafter], batch: int, strategy: Strategy) -> None:
    """A round of `batch` rows that belong to no request. It changes nothing that a later round reads."""
    rows = PassRows(batch)
    if strategy.plain:
        runner.decode(rows).read()
        return
    drafter = drafters[strategy.drafter]
    if drafter.on_device:
        runner.propose(rows, drafter, strategy)
    else:
        runner.propose_nothing(rows, strategy)
    runner.verify(rows._replace(upload=not drafter.on_device), strategy).read()
