"""How long an answer may become, from earlier answers to the same prompt or to prompts of about the same length."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

KEPT = 2**16  # prompts that are remembered
DIGEST = 16  # bytes by which one is known: prompts themselves, of thousands of tokens each, would take gigabytes
WEIGHT = 0.3  # of the newest answers in a moving average: the policy changes


class Lengths:
    def __init__(self, prior: float):
        """`prior` is the length expected of everything as long as nothing is known."""
        self.prior = prior
        self._same: dict[bytes, float] = {}
        self._similar: dict[int, float] = {}

    def expect(self, prompt: tuple[int, ...]) -> float:
        return self._same.get(_digest(prompt), self._similar.get(_size(prompt), self.prior))

    def learn(self, prompt: tuple[int, ...], lengths: Sequence[int]) -> None:
        if not lengths:
            return
        mean = sum(lengths) / len(lengths)
        key = _digest(prompt)
        self._same[key] = _moved(self._same.pop(key, mean), mean)
        self._similar[_size(prompt)] = _moved(self._similar.get(_size(prompt), mean), mean)
        self.prior = _moved(self.prior, mean)
        if len(self._same) > KEPT:
            self._same.pop(next(iter(self._same)))


def _digest(prompt: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(array("q", prompt).tobytes(), digest_size=DIGEST).digest()


def _size(prompt: tuple[int, ...]) -> int:
    return len(prompt).bit_length() * 4 + (4 * len(prompt) >> len(prompt).bit_length())  # quarters of a doubling


def _moved(old: float, new: float) -> float:
    return old + WEIGHT * (new - old)
