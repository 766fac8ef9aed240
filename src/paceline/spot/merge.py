"""One drafter out of those that idle workers have trained on their own: their average, weighted by the tokens that each
was trained on.

    each worker        contribution(trainer)
    all of them        the sum, element by element: an all-reduce
    each worker        merged(sum) -> the candidate, the same everywhere
    each worker        trainer.evaluate(candidate), on held-out answers of its own
    all of them        the sum of `Evaluation.sums`: an all-reduce
    each worker        trainer.accept_or_drop(candidate, Evaluation.from_sums(sum))

Nothing before the last line changes a trainer, so all of it can be done again if a worker dies on the way. A worker
that did not train takes part like the others: it adds nothing, may have held-out answers, and gets the new drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.spot.trainer import SpotTrainer


def contribution(trainer: SpotTrainer) -> list[Tensor]:
    """The weights in training times the tokens that they were trained on since the last version, and that number at the
    end; zeros from a worker that did not train, or whose weights are not finite.

    In float64 the product of a float32 weight and a number of tokens is exact, so an average over one worker gives back
    its own weights, bit for bit."""
    tokens = trainer.tokens if all(bool(w.isfinite().all()) for w in trainer.weights) else 0
    # Not a product with zero: that would keep what is not finite.
    scaled = [w.double() * tokens if tokens else torch.zeros_like(w, dtype=torch.float64) for w in trainer.weights]
    return [*scaled, torch.tensor([tokens], dtype=torch.float64, device=scaled[0].device)]


def merged(total: Sequence[Tensor]) -> list[Tensor] | None:
    """The average of those that trained, in float32; None if nobody did, or if it is not finite."""
    *weights, tokens = total
    if float(tokens) <= 0:
        return None
    average = [(w / tokens).float() for w in weights]
    return average if all(bool(w.isfinite().all()) for w in average) else None
