"""Batch sizes that are kept apart: the tuner's buckets, and those that CUDA graphs are captured for."""

from __future__ import annotations

from bisect import bisect_left


def batch_ladder(max_batch: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, … up to `max_batch`: each is at most half as large again as the one before, from 2 on."""
    ladder = {max_batch, 1}
    size = 2
    while size < max_batch:
        ladder |= {size, min(max_batch, size * 3 // 2)}
        size *= 2
    return sorted(ladder)


def bucket(ladder: list[int], batch: int) -> int:
    """The smallest size of the ladder that holds so many sequences; the largest one if none does."""
    return ladder[min(bisect_left(ladder, batch), len(ladder) - 1)]
