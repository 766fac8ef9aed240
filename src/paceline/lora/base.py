"""The adapted weights as they were before any adapter, bit by bit.

Merged weights are made anew from these after every update, so rounding never accumulates, and a model without its
adapters is the base again. In host memory they cost the device nothing and a merge the time of a transfer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK = 2**30  # bytes of pinned memory that tensors share: torch rounds each allocation of it up to a power of two
ALIGNMENT = 512
DIGEST_WORDS = 2**22  # words of a tensor that are summed at once


class BaseWeights:
    def __init__(self, weights: Mapping[str, Tensor], host: bool):
        """Copies of these, in pinned host memory or where they are."""
        pinned = _PinnedMemory() if host else None
        cuda = any(weight.is_cuda for weight in weights.values())
        copied = pinned.copy if pinned is not None and cuda else lambda weight: weight.detach().clone()
        self.weights = {name: copied(weight) for name, weight in weights.items()}
        self.digest = digest(weights)

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name]


def digest(weights: Mapping[str, Tensor]) -> str:
    """Of all bits: 64-bit words times odd numbers, summed modulo 2^64, so that one changed word always shows. Made
    where the weights are: a GPU takes some milliseconds for it."""
    total = 0
    for weight in weights.values():
        flat = weight.detach().reshape(-1)
        whole = flat.numel() * flat.itemsize % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0
        words = flat.view(torch.int64 if whole else torch.uint8)
        for n, some in enumerate(words.split(DIGEST_WORDS)):
            first = n * DIGEST_WORDS
            factors = 2 * torch.arange(first, first + len(some), device=some.device) + 1
            total = (total * 31 + int((some.to(torch.int64) * factors).sum())) % 2**64
    return f"{total:016x}"


class _PinnedMemory:
    """Page-locked host memory, from which a GPU reads at the full speed of its bus."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, weight: Tensor) -> Tensor:
        size = weight.numel() * weight.itemsize
        if self._used + size > len(self._block):
            block = BLOCK
            while block < size:
                block *= 2
            self._block = torch.empty(block, dtype=torch.uint8, pin_memory=True)
            self._used = 0
        target = self._block[self._used : self._used + size].view(weight.dtype).view(weight.shape)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return target.copy_(weight)
