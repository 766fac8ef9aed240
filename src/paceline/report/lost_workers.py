"""Workers that were lost in a run, and whether they were replaced.

The metrics say in which steps workers were lost (`cluster/lost`). For one that came back the timeline has a span from
when it stopped answering; one that did not come back has no span in the updates from then on."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.observe.timeline import LOST, UPDATE
from paceline.report.rundata import RunData

MAX_LOST = 10**4  # workers that a step can have lost: a larger number is damage
MAX_DESCRIBED = 4  # losses; more are summed up in one sentence


@dataclass(frozen=True)
class WorkerLoss:
    worker: int | None
    """None if the run does not tell which."""
    step: int
    back: int | None = None
    """The step in which it took part again."""
    seconds: float = 0.0
    """From when it stopped answering until then."""


def find_losses(run: RunData) -> list[WorkerLoss]:
    counts = {row["step"]: row.get("cluster/lost", 0.0) for row in run.metrics}
    unexplained = {step: int(count) for step, count in counts.items() if 1 <= count <= MAX_LOST}  # NaN is neither
    loss_steps = sorted(unexplained)
    losses = _that_returned(run, loss_steps)
    for loss in losses:
        unexplained[loss.step] = unexplained.get(loss.step, 0) - 1
    updated: dict[int, set[int]] = {}  # workers that took part in the update of each step
    for span in run.spans:
        if span.name == UPDATE:
            updated.setdefault(span.step, set()).add(span.worker)
    for step in loss_steps:
        away = {loss.worker for loss in losses if loss.step <= step and (loss.back is None or step < loss.back)}
        gone: set[int] = set()
        if updated:
            after = updated.get(step + 1, updated.get(step, set()))
            gone = updated.get(step - 1, set(run.workers)) - after - away
        named = sorted(gone)[: max(0, unexplained[step])]
        losses += [WorkerLoss(worker, step) for worker in named]
        if not away:  # one that is away already may be lost once more while it restarts
            losses += [WorkerLoss(None, step)] * (unexplained[step] - len(named))
    return sorted(losses, key=lambda loss: (loss.step, loss.worker if loss.worker is not None else -1))


def _that_returned(run: RunData, loss_steps: list[int]) -> list[WorkerLoss]:
    """A loss for each span of a lost worker, in the step of the metrics that is nearest to its beginning."""
    ends: dict[int, float] = {}
    for span in run.spans:
        if span.name != LOST:
            ends[span.step] = max(span.end, ends.get(span.step, 0.0))
    losses = []
    for span in run.spans:
        if span.name == LOST:
            begun = next((step for step in sorted(ends) if ends[step] >= span.start), span.step)
            step = min(loss_steps, key=lambda n: (abs(n - begun), n), default=begun)
            losses.append(WorkerLoss(span.worker, step, span.step, span.seconds))
    return losses


def describe_losses(losses: list[WorkerLoss]) -> list[str]:
    """In sentences."""
    if len(losses) <= MAX_DESCRIBED:
        return [_describe(loss) for loss in losses]
    still = sum(loss.back is None for loss in losses)
    rest = f"{still} did not come back" if still else "all came back"
    first = losses[0].step
    last = losses[-1].step
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
