"""Workers that were lost in a run, and whether they came back.

The metrics say in which steps workers were lost (`cluster/lost`). Of one that came back the timeline has a span from
when it was missed; of one that did not, it shows that it had no part in the updates from then on."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.observe.timeline import LOST, UPDATE
from paceline.report.rundata import RunData

MOST = 10**4  # workers that a step can have lost
MANY = 4  # losses of which each gets a sentence


@dataclass(frozen=True)
class WorkerLoss:
    worker: int | None
    """None if the run does not tell which."""
    step: int
    back: int | None = None
    """The step in which it took part again."""
    seconds: float = 0.0
    """Until then."""


def find_losses(run: RunData) -> list[WorkerLoss]:
    lost = {row["step"]: row.get("cluster/lost", 0.0) for row in run.metrics}
    left = {step: int(count) for step, count in lost.items() if 1 <= count <= MOST}  # NaN is neither
    struck = sorted(left)
    ends: dict[int, float] = {}
    part: dict[int, set[int]] = {}  # who took part in the update of each step
    for span in run.spans:
        if span.name != LOST:
            ends[span.step] = max(span.end, ends.get(span.step, 0.0))
        if span.name == UPDATE:
            part.setdefault(span.step, set()).add(span.worker)
    out = []
    for span in run.spans:
        if span.name == LOST:
            begun = next((step for step in sorted(ends) if ends[step] >= span.start), span.step)
            step = min(struck, key=lambda n: (abs(n - begun), n), default=begun)
            out.append(WorkerLoss(span.worker, step, span.step, span.seconds))
            left[step] = left.get(step, 0) - 1
    for step in struck:
        away = {loss.worker for loss in out if loss.step <= step and (loss.back is None or step < loss.back)}
        gone: set[int] = set()
        if part:
            after = part.get(step + 1, part.get(step, set()))
            gone = part.get(step - 1, set(run.workers)) - after - away
        named = sorted(gone)[: max(0, left[step])]
        out += [WorkerLoss(worker, step) for worker in named]
        if not away:  # one that is away already may be lost once more on its way back
            out += [WorkerLoss(None, step)] * (left[step] - len(named))
    return sorted(out, key=lambda loss: (loss.step, loss.worker if loss.worker is not None else -1))


def describe_losses(losses: list[WorkerLoss]) -> list[str]:
    """In words."""
    if len(losses) <= MANY:
        return [_describe(loss) for loss in losses]
    still = sum(loss.back is None for loss in losses)
    rest = f"{still} did not come back" if still else "all came back"
    first, last = losses[0].step, losses[-1].step
    return [f"Workers were lost {len(losses)} times, first in step {first}, last in step {last}; {rest}."]


def _describe(loss: WorkerLoss) -> str:
    if loss.worker is None:
        return f"A worker was lost in step {loss.step}."
    if loss.back is None:
        return f"Worker {loss.worker} was lost in step {loss.step} and did not come back."
    return (
        f"Worker {loss.worker} was lost in step {loss.step} and took part again in step {loss.back}, "
        f"{loss.seconds:.1f} s later."
    )
