"""Who holds which part of the optimizer's state.

Parameters are dealt into slots of about equal size, one per worker. A slot is held by one worker and, as long as there
is another, by a second one that computes the same from the same gradients: so a worker can be lost at any moment, and
nothing has to be sent to anyone as long as none is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COPIES = 2
Holders = tuple[int, ...]


def deal(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Indices in `count` shares of about equal size: the largest first, each to the share that has least."""
    shares: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        share = min(range(count), key=lambda s: (load[s], s))
        shares[share].append(i)
        load[share] += sizes[i]
    return [sorted(share) for share in shares]


def make_slots(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Names of parameters, slot by slot."""
    names = list(sizes)
    return [[names[i] for i in share] for share in deal([sizes[name] for name in names], count)]


def assign_holders(slots: int, workers: Sequence[int]) -> list[Holders]:
    """For each slot the workers that hold it, the first of which answers for it."""
    n = len(workers)
    return [tuple(workers[(slot + k) % n] for k in range(min(COPIES, n))) for slot in range(slots)]


def sources(before: Sequence[Holders], workers: Sequence[int]) -> list[int | None]:
    """For each slot a worker among `workers` that holds it; None if all that did are gone."""
    return [next((w for w in holders if w in workers), None) for holders in before]
