"""What workers without anything to decode do meanwhile: gradients of finished groups first, then the next step's
requests ahead."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.simulate.costs import BatchCurve, StepWork
from paceline.simulate.rollout import SimRollout


def gradients_in_tail(rollout: SimRollout, work: StepWork, gradient_token_s: float) -> float:
    """Worker seconds of gradients that fit into the idle time: a group's from when its last completion has ended."""
    ends = [rollout.ended[request] for request in sorted(rollout.ended)]
    groups = [max(ends[i : i + work.group]) for i in range(0, len(ends), work.group)]
    if not groups:
        return 0.0
    each = work.update_tokens * gradient_token_s / len(groups)  # worker seconds of a group, on average
    changes = sorted({0.0, *groups, *(moment for span in rollout.dry for moment in span)})
    ready = done = 0.0
    for start, end in pairwise(changes):
        ready += each * sum(group == start for group in groups)
        idle = sum(since <= start and end <= until for since, until in rollout.dry)
        done += min(ready - done, idle * (end - start))
    return done


@dataclass(frozen=True)
class Coupling:
    """How alike neighbouring policies write, under the same noise."""

    tokens_per_flip: float
    seed: int = 0

    def kept(self, written: float, request: int, step: int) -> float:
        """Tokens before the first one that the next policy writes differently."""
        dice = random.Random(f"{self.seed} {step} {request}")
        flip = math.log(1.0 - dice.random()) / math.log(1.0 - 1.0 / max(self.tokens_per_flip, 1.0 + 1e-9))
        return min(written, flip)


def write_ahead(
    seconds: float, workers: int, lengths: Sequence[int], curve: BatchCurve, slots: int
) -> tuple[list[float], float]:
    """So many workers decode the next step's requests for `seconds` each -> tokens written of each request, and the
    worker seconds that it took: fewer where they are all written. They are dealt evenly, and a worker's are begun
    together, as far as there are slots."""
    written = [0.0] * len(lengths)
    spent = 0.0
    if seconds <= 0:
        return written, spent
    for worker in range(min(workers, len(lengths))):
        mine = sorted(range(worker, len(lengths), workers)[:slots], key=lambda r: lengths[r])
        left = seconds
        tokens = 0.0  # of each that still runs
        for index, request in enumerate(mine):
            token_s = curve.at(len(mine) - index)
            gained = min(lengths[request] - tokens, left / token_s)
            left -= gained * token_s
            tokens += gained
            written[request] = tokens  # it has ended, or the time is over for it and for all that are longer
        spent += seconds - left
    return written, spent
